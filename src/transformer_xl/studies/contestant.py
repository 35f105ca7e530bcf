"""One contestant of a comparison: trained, then measured."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from transformer_xl.config import Config, GenerateConfig, Precision, describe_machine, pick_device
from transformer_xl.data import prepare
from transformer_xl.inference.evaluate import (
    NGramMixture,
    Result,
    evaluate_by,
    plan_ngram_cache,
)
from transformer_xl.inference.generate import prompt_for
from transformer_xl.model import LanguageModel, build_model, load_model
from transformer_xl.train import Optimizer, RunFolder, train

Found = dict[str, Any]
"""What is measured of a run, as in JSON."""
Shape = Sequence[int]
MEM_LENS = (1, 2, 4)
"""Memory lengths to choose from, on the validation text, as multiples of that of training."""
_CHOOSING = 50_000
"""Tokens of the validation text on which they are compared."""
_OF_MACHINE = ("processor", "instructions", "gpu", "threads")
"""What is recorded of the machine of a run."""


def measured(config: Config, folder: Path, *, n_tokens: int | None = None) -> Found:
    """Train a contestant, or resume it, and measure it.

    Args:
        config: Its recipe. Its ``eval.ngram_cache`` is for the test text.
        folder: Its run folder.
        n_tokens: Evaluate on this many tokens from the start of each split. None: on all.

    Returns:
        ``training``: tokens, seconds, steps and FLOPs; ``valid`` and ``test``: the losses, with the
        memory length that is best on the validation text; ``with_counts``: that of
        the test text with the n-gram cache, if there is one; and the machine.
    """
    corpus = prepare(config.data, lambda _: None)
    # Required, although no sample is written.
    config = replace(config, generate=GenerateConfig(prompt=prompt_for(corpus.vocab)))
    device = pick_device()
    train(config, folder, quiet=True, reports=False)
    model = load_model(folder / "model" / "best").to(device)
    about = describe_machine()
    machine = {name: about[name] for name in _OF_MACHINE}
    result: Found = {"training": _trained(config, model, folder)}
    split, segment_len = corpus.held_out, config.train.segment_len

    def losses(
        split: str,
        mem_len: int | None,
        n_tokens: int | None = n_tokens,
        ngram_cache: NGramMixture | None = None,
    ) -> Result:
        ids = corpus.split(split)[: n_tokens and n_tokens + 1]
        share = len(ids) / max(corpus.n_tokens(split), 1)
        return evaluate_by(
            config.eval if mem_len is None else replace(config.eval, mem_len=mem_len),
            model,
            ids,
            vocab=corpus.vocab,
            n_bytes=round(corpus.n_bytes(split) * share),
            segment_len=segment_len,
            ngram_cache=ngram_cache,
        )

    with Precision(config.train.precision, device).autocast():
        best = None
        if model.remembers_positions and config.model.mem_len:
            n = min(_CHOOSING, n_tokens or _CHOOSING)
            mem_lens = [factor * config.model.mem_len for factor in MEM_LENS]
            best = min(mem_lens, key=lambda mem_len: losses("valid", mem_len, n).nll)
        result["valid"] = _figures(losses("valid", best))
        n_tested = min(n_tokens or corpus.n_tokens(split), corpus.n_tokens(split))
        cache = plan_ngram_cache(config.eval, n_tested, lambda: corpus.split("train"))
        tested = losses(split, best, ngram_cache=cache)
        result["test"] = _figures(tested) | {"split": split}
        if tested.nll_with_cache is not None:
            bits = {"bits_per_token": tested.nll_with_cache / math.log(2)}
            result["with_counts"] = bits | {"bits_per_byte": tested.bits_per_byte_with_cache}
    return result | {"machine": machine | {"torch": str(torch.__version__)}}


def _trained(config: Config, model: LanguageModel, folder: Path) -> dict[str, object]:
    """Return what the training cost."""
    state = RunFolder(folder).last_state()
    tokens = tokens_read(state)
    parameters = sum(p.numel() for p in model.parameters())
    of_model, of_update = training_flops(config, model)
    # A table that embedding and softmax share counts once.
    outside = {*model.embedding.parameters(), *model.softmax.parameters()}
    return {
        "steps": state["step"],
        "tokens": tokens,
        "seconds": state["seconds"],
        "parameters": parameters,
        "inside": parameters - sum(p.numel() for p in outside),
        "dtype": Precision(config.train.precision, model.device).name,
        "mflop_per_token": (of_model + of_update * state["step"] / tokens) / 1e6,
    }


def tokens_read(state: Mapping[str, Any]) -> int:
    """Return how many tokens a training has read, given its state."""
    read = state["segments"]
    # Where all segments have one length, the position is not stored.
    position = read.get("position", read["segments_read"] * read["segment_len"])
    return position * read["batch_size"]


def training_flops(config: Config, model: LanguageModel) -> tuple[float, float]:
    """Count the FLOPs of a training, in matrix products.

    Counted by PyTorch, as computed: masked scores count, elementwise operations do not. Segments
    and memories have the lengths of the last stage; of random memory lengths it is the mean.

    Returns:
        Those of a token, forward and backward, and those of an update of the weights.
    """
    counted = build_model(model.config).train()
    B, T = config.train.batch_size, config.train.segment_len
    tokens = torch.randint(model.config.vocab_size, (B, T + 1))
    mems = None
    with torch.no_grad():
        for _ in range(1 + -(-model.config.mem_len // T)):
            mems = counted(tokens[:, :-1], mems).mems
    optimizer = Optimizer(counted, config.train)
    with warnings.catch_warnings():
        # oneDNN's switch warns of GPUs that are not there.
        warnings.simplefilter("ignore", UserWarning)
        # On the CPU, fused attention and LSTM kernels are not counted; the same products without
        # them are.
        with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
            mem_lens = config.train.mem_lens(model.config.mem_len)
            with _flop_counter() as counter:
                for mem_len in mem_lens:
                    past = mems.last(mem_len) if model.remembers_positions and mems else mems
                    loss = counted(tokens[:, :-1], past, tokens[:, 1:]).loss
                    assert loss is not None
                    loss.backward()
            of_model = counter.get_total_flops() / (B * T * len(mem_lens))
            with _flop_counter() as counter:
                optimizer.step(1.0)
    return of_model, float(counter.get_total_flops())


def _flop_counter() -> FlopCounterMode:
    """Count operations that PyTorch leaves out, or counts wrongly, too."""
    aten, mapping = torch.ops.aten, {}
    mapping[aten.addmm_] = mapping[aten.baddbmm_] = _product_flop
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        mapping[torch.ops.mkldnn._linear_pointwise] = _linear_flop
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    # Its own hangs hooks on all modules, which are called otherwise then, with other products.
    counter.mod_tracker = _Untracked()  # pyright: ignore[reportAttributeAccessIssue]
    return counter


class _Untracked:
    """All that is counted belongs to the whole."""

    parents = ("Global",)

    def __enter__(self) -> "_Untracked":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _product_flop(
    total_shape: Shape, a_shape: Shape, b_shape: Shape, *_: object, **__: object
) -> int:
    del total_shape
    return 2 * math.prod(a_shape) * b_shape[-1]


def _linear_flop(x_shape: Shape, w_shape: Shape, *_: object, **__: object) -> int:
    return 2 * math.prod(x_shape) * w_shape[0]


def _figures(result: Result) -> Found:
    names = ("nll", "ppl", "bits_per_token", "bits_per_byte", "tokens", "mem_len", "ext_len")
    return {name: getattr(result, name) for name in names}
