"""One contestant of a comparison: trained, then measured in every way that it is compared."""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from transformer_xl.config import (
    Config,
    GenerateConfig,
    autocast,
    describe_machine,
    pick_device,
    pick_precision,
    replace_file,
)
from transformer_xl.data import Corpus, prepare
from transformer_xl.inference.evaluate import Result, evaluate_by
from transformer_xl.inference.generate import prompt_for
from transformer_xl.model import (
    Decoder,
    EagerDecoder,
    LanguageModel,
    Lengths,
    build_model,
    load_model,
    read_all,
)
from transformer_xl.ops import peak_mb, timed
from transformer_xl.train import CHECKPOINTS, Optimizer, checkpoints_in, held_out, read_about, train
from transformer_xl.train.seen import loss_from_start, spans

PEAK_FILE = "peak_mb.txt"
"""In the run folder: the peak memory of the training in MB."""
MEM_LENS = (1, 2, 4)
"""Memory lengths to choose from, on the validation text, as multiples of that of training."""
_CHOOSING = 50_000
"""Tokens of the validation text on which they are compared."""
CONTEXTS = (0, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Memory lengths up to far beyond that of training, at which a model is evaluated."""
_READ = 8_192
"""Tokens of each piece of the test text that are predicted with each of them."""
_FROM_START = 8_192
"""Tokens of each piece of text that is read from an empty memory."""
WRITTEN = (1_000, 10_000, 100_000, 1_000_000)
"""Tokens of a stream after which the size of the state and the time of a token are measured."""
_OF_MACHINE = ("processor", "instructions", "gpu", "threads")
"""What is recorded of the machine of a run."""
_WRITTEN_PER_TOKEN = 10
"""Tokens of a stream after which writing is measured at most, for each token of an evaluation that
is limited to so many."""
_STEPS = 256
"""Tokens of which the time is the median."""


def measured(
    config: Config, folder: Path, *, n_tokens: int | None = None, is_detailed: bool = True
) -> dict[str, Any]:
    """Train a contestant, or resume it, and measure it.

    Args:
        config: Its recipe.
        folder: Its run folder.
        n_tokens: Evaluate on this many tokens from the start of each split, also in detail. None:
            on all.
        is_detailed: Also measure the loss by context, and writing.

    Returns:
        ``training``: tokens, seconds and steps, FLOPs and memory;
        ``valid`` and ``test``: the losses, with the memory length that is best on the validation
        text; if detailed ``by_mem_len``, ``from_start`` and ``writing``; and the machine.
    """
    corpus = prepare(config.data, lambda _: None)
    # Required, although no sample is written.
    config = replace(config, generate=GenerateConfig(prompt=prompt_for(corpus.vocab)))
    device, peak_file = pick_device(), folder / PEAK_FILE
    train(config, folder, quiet=True, reports=False)
    if not peak_file.exists():
        # Later, a process that measures only has another peak.
        replace_file(peak_file, f"{peak_mb(device)}\n".encode())
    model = load_model(folder / "model" / "best").to(device)
    trained = _trained(config, model, folder) | {"peak_mb": float(peak_file.read_text())}
    about = describe_machine()
    machine = {name: about[name] for name in _OF_MACHINE}
    result: dict[str, Any] = {"training": trained}
    split, segment_len = held_out(corpus), config.train.segment_len

    def losses(split: str, mem_len: int | None, n_tokens: int | None = n_tokens) -> Result:
        ids = corpus.split(split)[: n_tokens and n_tokens + 1]
        share = len(ids) / max(corpus.n_tokens(split), 1)
        return evaluate_by(
            config.eval if mem_len is None else replace(config.eval, mem_len=mem_len),
            model,
            ids,
            vocab=corpus.vocab,
            n_bytes=round(corpus.n_bytes(split) * share),
            segment_len=segment_len,
        )

    lengths = Lengths.of(model.config, **config.eval.lengths_after(segment_len))
    with autocast(config.train.precision, device):
        best = None
        if model.remembers_positions and config.model.mem_len:
            n = min(_CHOOSING, n_tokens or _CHOOSING)
            mem_lens = [factor * config.model.mem_len for factor in MEM_LENS]
            best = min(mem_lens, key=lambda mem_len: losses("valid", mem_len, n).nll)
            lengths = lengths._replace(mem_len=best)
        result["valid"] = _figures(losses("valid", best))
        result["test"] = _figures(losses(split, best)) | {"split": split}
        if is_detailed:
            ids = corpus.split(split)[: n_tokens and n_tokens + 1]
            result |= _by_context(model, ids, lengths)
    if is_detailed:
        # In the precision of the weights, as `txl generate` does.
        counts = [n for n in WRITTEN if n_tokens is None or n <= _WRITTEN_PER_TOKEN * n_tokens]
        result["writing"] = [*_written(model, corpus, lengths, segment_len, counts)]
    return result | {"machine": machine | {"torch": str(torch.__version__)}}


def _trained(config: Config, model: LanguageModel, folder: Path) -> dict[str, Any]:
    """Return what the training cost."""
    state = read_about(checkpoints_in(folder / CHECKPOINTS)[0])
    read, seconds = state["segments"], state["seconds"]
    # Where all segments have one length, the position is not stored.
    position = read.get("position", read["segments_read"] * read["segment_len"])
    tokens = position * read["batch_size"]
    parameters = sum(p.numel() for p in model.parameters())
    of_model, of_update = training_flops(config, model)
    # A table that embedding and softmax share counts once.
    outside = {*model.embedding.parameters(), *model.softmax.parameters()}
    return {
        "steps": state["step"],
        "tokens": tokens,
        "seconds": seconds,
        "parameters": parameters,
        "inside": parameters - sum(p.numel() for p in outside),
        "dtype": pick_precision(config.train.precision, model.device),
        "mflop_per_token": (of_model + of_update * state["step"] / tokens) / 1e6,
    }


def training_flops(config: Config, model: LanguageModel) -> tuple[float, float]:
    """Count the FLOPs of a training, in matrix products and convolutions.

    Counted by PyTorch, as computed: masked scores count, elementwise operations do not. The memory
    is full, and segments have the length of the last stage.

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
            with _flop_counter() as counter:
                loss = counted(tokens[:, :-1], mems, tokens[:, 1:]).loss
                assert loss is not None
                loss.backward()
            of_model = counter.get_total_flops() / (B * T)
            with _flop_counter() as counter:
                optimizer.step(1.0)
    return of_model, float(counter.get_total_flops())


def _flop_counter() -> FlopCounterMode:
    """Count operations that PyTorch leaves out, or counts wrongly, too."""
    aten, mapping = torch.ops.aten, {}
    mapping[aten.addmm_] = mapping[aten.baddbmm_] = _product_flop
    mapping[aten.convolution_backward] = _convolution_backward
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


def _product_flop(total_shape: Any, a_shape: Any, b_shape: Any, *_: Any, **__: Any) -> int:
    del total_shape
    return 2 * math.prod(a_shape) * b_shape[-1]


def _linear_flop(x_shape: Any, w_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x_shape) * w_shape[0]


def _convolution_backward(grad_shape: Any, x_shape: Any, w_shape: Any, *_: Any, **__: Any) -> int:
    """Count both gradients of a convolution: each has the products of the forward pass.

    PyTorch counts those of a depthwise convolution as if it were dense.
    """
    del x_shape
    return 2 * conv_flop_count(grad_shape, w_shape, grad_shape)


def _figures(result: Result) -> dict[str, Any]:
    names = ("nll", "ppl", "bits_per_token", "bits_per_byte", "tokens", "mem_len", "ext_len")
    return {name: getattr(result, name) for name in names}


def _by_context(model: LanguageModel, ids: np.ndarray, lengths: Lengths) -> dict[str, Any]:
    """Measure the loss by memory length, and by the number of tokens since an empty memory."""
    longest = max(CONTEXTS)
    n_read = min(longest + _READ, len(ids) - 1)
    by_mem_len = []
    for n in CONTEXTS if model.remembers_positions else ():
        with_context = _with_context(model, lengths, n)
        losses = loss_from_start(model, ids, length=n_read, **with_context._asdict())
        # Only where as much comes before, or the last half of a short text.
        nll = float(np.nanmean(losses[min(longest, n_read // 2) :]))
        by_mem_len.append({"context": n, "nll": nll})
    length = min(_FROM_START, len(ids) - 1)
    from_start = loss_from_start(model, ids, length=length, batch_size=16, **lengths._asdict())
    return {"by_mem_len": by_mem_len, "from_start": spans(from_start)}


def _with_context(model: LanguageModel, lengths: Lengths, n: int) -> Lengths:
    """Return lengths with which a token sees at least ``n`` before it, if the text has them."""
    if model.config.mem_len:
        return lengths._replace(mem_len=n, ext_len=0)
    # Without a memory they are read again; in long strides, as each costs the whole context.
    return lengths._replace(mem_len=0, ext_len=n, segment_len=max(lengths.segment_len, n // 4))


@torch.no_grad()
def _written(
    model: LanguageModel, corpus: Corpus, lengths: Lengths, trained: int, counts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Measure the time of a token and the size of the state, after ever more tokens.

    The tokens before are read in segments, as stepping through a million takes too long; the last
    of them is then stepped :data:`_STEPS` times, twice: ``ms_per_token`` is the time of the
    fastest ``step`` of the model, and ``ms_called`` of that which all models have, and which
    calls the model for each token. A text that is shorter than a count ends the measurement.
    """
    model.eval()
    ids = np.asarray(corpus.split("train")[: max(counts, default=0)], dtype=np.int64)
    text, done = torch.from_numpy(ids)[None].to(model.device), 0
    # Without a memory, the context of training is cached.
    mem_len = lengths.mem_len or trained
    lengths = lengths._replace(ext_len=0, segment_len=min(128, mem_len), mem_len=mem_len)
    memory = model.start_memory(1, mem_len)
    for n in counts:
        if n > text.shape[1]:
            return
        memory = read_all(model, text[:, done:n], lengths, memory)
        done, last = n, text[:, n - 1]
        # What the steps read: keys and values, where the model can keep them.
        held = model.keep(memory)
        decoder = Decoder.of(model, lengths, memory)
        ms = 1e3 * timed(partial(decoder, last), _STEPS, model.device)["seconds"]
        called = ms
        if not isinstance(decoder, EagerDecoder):
            plain = EagerDecoder(model, lengths, held)
            called = 1e3 * timed(partial(plain, last), _STEPS, model.device)["seconds"]
        yield {
            "tokens": n,
            "state_bytes": held.nbytes,
            "ms_per_token": ms,
            "step": decoder.kind,
            "ms_called": called,
        }
