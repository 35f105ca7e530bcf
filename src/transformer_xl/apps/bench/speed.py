"""Seconds, tokens per second and utilization of the machine.

FLOPs are counted by the definition of the model: products of queries with the keys that they see,
the memory projected again where the weights change, positions projected once for all streams.
Additional work of an implementation, such as scores that are masked afterwards, is not counted.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from transformer_xl.config import Config, ModelConfig
from transformer_xl.config.checks import require
from transformer_xl.config.device import autocast, describe_machine, pick_device, pick_precision
from transformer_xl.data import Segments
from transformer_xl.data.catalogue import known_vocab_size
from transformer_xl.inference.generate import generate
from transformer_xl.model import LanguageModel, Memory, TransformerXL
from transformer_xl.model.arguments import require_token_inputs
from transformer_xl.model.limits import layer_matrices
from transformer_xl.model.reading import read
from transformer_xl.model.segment import Lengths
from transformer_xl.ops import choose_backend
from transformer_xl.ops.timing import ceiling, peak_mb, reading_rate, timed
from transformer_xl.train import Network, TrainState, train_step
from transformer_xl.train.optim import Optimizer, new_average


def forward_flops(
    config: ModelConfig, B: int, T: int, M: int, predicted: int, *, is_kept: bool
) -> float:
    """Count the FLOPs of B streams of T tokens with a memory of M, two for a multiplication.

    Args:
        config: The model.
        B: Streams.
        T: Tokens of each.
        M: Memory length.
        predicted: Tokens of each stream that have a target.
        is_kept: The memory holds keys and values, and the positions are projected already.
    """
    learning, given = _layer(config, B, T, M, 1)
    outside = B * T * _embedding(config) + B * predicted * _softmax(config, 0)
    return 2 * (config.n_layer * (learning + (not is_kept) * given) + outside)


def training_flops(
    config: ModelConfig, B: int, T: int, M: int, predicted: int, accumulate: int = 1
) -> float:
    """Count the FLOPs of a training step in ``accumulate`` parts; see :func:`forward_flops`.

    A product costs twice as much in the backward pass, because both factors have a gradient; but
    the memory and the encodings of positions have none.
    """
    learning, given = _layer(config, B, T, M, accumulate)
    outside = B * T * _embedding(config) + B * predicted * _softmax(config, config.sample_softmax)
    return 2 * (config.n_layer * (3 * learning + 2 * given) + 3 * outside)


def token_bytes(config: ModelConfig, M: int, bytes_per_number: int) -> int:
    """Count the bytes of weights, keys and values that one token of one stream must read.

    Of an adaptive softmax only the head counts, which suffices for most tokens.
    """
    head = config.clusters[0]
    layer = _maps(config) + 2 * M * config.n_head * config.head_width
    softmax = head.width * (head.stop + head.has_proj * config.d_model)
    return bytes_per_number * (config.n_layer * layer + softmax)


def _layer(config: ModelConfig, B: int, T: int, M: int, n_parts: int) -> tuple[int, int]:
    """Count multiplications of a layer: with gradients of both factors, of the weights alone.

    The latter are the projections of the memory and of positions.
    """
    D, width = config.d_model, config.n_head * config.head_width
    limits = config.layer_attn_lens or (config.attn_len or M + T,)
    limits = [min(each, config.attn_len or each) for each in limits]
    # The mean over the layers.
    n_pairs = sum(min(M + i, each) for i in range(1, T + 1) for each in limits) // len(limits)
    # Relative positions are a third product besides those with keys and values.
    attention = (3 if config.attn_type in (0, 1) else 2) * width * n_pairs
    positions = n_parts * (M + T) * D * width if config.attn_type == 0 else 0
    return B * (T * _maps(config) + attention), B * 2 * M * D * width + positions


def _maps(config: ModelConfig) -> int:
    """Weights of a layer by which each token is multiplied, without those for positions."""
    positions = config.d_model * config.n_head * config.head_width * (config.attn_type == 0)
    return sum(rows * columns for rows, columns in layer_matrices(config)) - positions


def _embedding(config: ModelConfig) -> float:
    """Multiplications for a token drawn uniformly."""
    return sum(
        (x.stop - x.start) / config.vocab_size * x.has_proj * x.width * config.d_model
        for x in config.clusters
    )


def _softmax(config: ModelConfig, n_samples: int) -> float:
    """Multiplications for a target drawn uniformly; with a sample, its words and the target."""
    D, (head, *tails) = config.d_model, config.clusters
    n_outputs = n_samples + 1 if n_samples else head.stop + len(tails)
    total: float = head.width * (n_outputs + head.has_proj * D)
    for x in tails:
        n_words = x.stop - x.start
        total += n_words / config.vocab_size * x.width * (n_words + x.has_proj * D)
    return total


TOKENS = 32
"""Least number of generated tokens: the time of one is so short that it is noisy."""
_ASSUMED_SIZES = {"authors-bytes": 204, "chars": 100, "words": 10_000, "integers": 50}
"""Assumed vocabulary size of an unknown text, by ``data.vocab``."""


def with_vocabulary(config: Config) -> Config:
    """Return the recipe with a vocabulary size, assumed if it depends on the text."""
    require_token_inputs(config.model)
    size = config.model.vocab_size or known_vocab_size(config.data)
    # The size of an external tokenizer is not known here.
    size = size or _ASSUMED_SIZES.get(config.data.vocab, 4096)
    return replace(config, model=replace(config.model, vocab_size=size))


def training(config: Config, device: torch.device) -> tuple[TrainState, Callable[[], Tensor]]:
    """Set up training on random tokens; return the state and a function that makes a step.

    A step is like those at the end of a run: with the lengths of the last stage, and with the
    average of the weights.

    Raises:
        ValueError: It is another kind of model.
    """
    require_transformer_xl(config.model)
    is_averaged = config.train.average != "none"
    settings = replace(config.train, stages=(), average_start=0.0 if is_averaged else None)
    config = replace(config, train=settings)
    torch.manual_seed(settings.seed)
    model = TransformerXL(config.model).to(device).train()
    model.recompute = settings.recompute
    B, T, M = settings.batch_size, settings.segment_len, config.model.mem_len
    numbers = np.random.default_rng(settings.seed)
    tokens = numbers.integers(config.model.vocab_size, size=8 * B * T + 1)
    n_parts = settings.accumulate
    state = TrainState(
        model=model,
        optimizer=Optimizer(model, settings),
        segments=Segments(tokens, B, T, config.model.ext_len),
        mems=[full_memory(model, B // n_parts, M) for _ in range(n_parts)],
        total_steps=settings.steps,
        corpus={},
        average=new_average(model, settings),
    )
    network = Network(model, settings, state.world)
    return state, lambda: train_step(config, state, network).loss


def measure(config: Config, steps: int) -> dict[str, Any]:
    """Measure training, evaluation and generation, ``steps`` of each, by a complete recipe.

    Returns:
        For each of the three its seconds, tokens per second and utilization.

    Raises:
        ValueError: ``steps`` is below 1, or it is another kind of model.
    """
    require(steps >= 1, f"steps={steps} must be at least 1")
    device = pick_device()
    mb_at_first = peak_mb(device)
    state, step = training(config, device)
    trained = training_size(config) | timed(step, steps, device)
    trained |= {"mb_at_first": mb_at_first, "peak_mb": peak_mb(device)}
    model = state.model
    del state, step
    dtype = pick_precision(config.train.precision, device)
    gflops, reading = ceiling(dtype, device), reading_rate(device)
    evaluated = _evaluate(config, model.eval(), steps, device)
    written = _generate(config, model, steps, device)
    for part in (trained, evaluated, written):
        part["tokens_per_second"] = part["batch_size"] * part["segment_len"] / part["seconds"]
    for part in (trained, evaluated):
        part["dtype"] = dtype
        part["share_of_ceiling"] = part["gflop"] / part["seconds"] / gflops
    written["share_of_reading"] = written["mb_read"] / 1e3 / written["seconds"] / reading
    return {
        **circumstances(config, device),
        "parameters": sum(p.numel() for p in model.parameters()),
        "ceiling": {"dtype": dtype, "gflop_per_s": gflops, "reading_gb_per_s": reading},
        "training": trained,
        "evaluation": evaluated,
        "generation": written,
    }


def circumstances(config: Config, device: torch.device) -> dict[str, Any]:
    """Describe the model and the environment of a measurement."""
    machine = describe_machine()
    dtype = getattr(torch, pick_precision(config.train.precision, device))
    attention = choose_backend(device, dtype, config.model.head_width).backend
    return {
        "device": machine["gpu" if device.type == "cuda" else "processor"],
        "threads": machine["threads"],
        "torch": torch.__version__,
        "attention": attention + (", compiled" if config.train.compile else ""),
        "n_layer": config.model.n_layer,
        "d_model": config.model.d_model,
        "vocab_size": config.model.vocab_size,
    }


def training_size(config: Config) -> dict[str, Any]:
    """Return the sizes and the GFLOPs of a training step."""
    settings, model = config.train, config.model
    B, T, M = settings.batch_size, settings.segment_len, model.mem_len
    predicted = T - T // 2 if settings.loss == "half" else T
    flops = training_flops(model, B, T + model.ext_len, M, predicted, settings.accumulate)
    return {"batch_size": B, "segment_len": T, "mem_len": M, "gflop": flops / 1e9}


def _evaluate(
    config: Config, model: LanguageModel, steps: int, device: torch.device
) -> dict[str, Any]:
    """Measure a segment of an evaluation."""
    settings = config.eval
    lengths = Lengths.of(config.model, **settings.lengths_after(config.train.segment_len))
    B, T, M, ext_len = settings.batch_size, lengths.segment_len, lengths.mem_len, lengths.ext_len
    window = torch.randint(config.model.vocab_size, (B, ext_len + T + 1), device=device)
    tokens, targets = window[:, :-1], window[:, ext_len + 1 :]
    mems = model.keep(full_memory(model, B, M))
    is_kept = mems.has_keys
    step = reading_step(model, tokens, targets, lengths, mems)
    with torch.no_grad(), autocast(config.train.precision, device):
        taken = timed(step, steps, device)
    as_read = replace(config.model, attn_len=lengths.attn_len)
    flops = forward_flops(as_read, B, ext_len + T, M, T, is_kept=is_kept)
    return {"batch_size": B, "segment_len": T, "mem_len": M, "gflop": flops / 1e9} | taken


def _generate(
    config: Config, model: LanguageModel, steps: int, device: torch.device
) -> dict[str, Any]:
    """Measure a token of `txl generate`: one stream, in the precision of the weights."""
    M = config.model.mem_len
    writing = generate(model, [0], mems=full_memory(model, 1, M), seed=0)
    taken = timed(lambda: next(writing), max(steps, TOKENS), device)
    mb = token_bytes(config.model, M, model.dtype.itemsize) / 1e6
    dtype = str(model.dtype).removeprefix("torch.")
    return {"batch_size": 1, "segment_len": 1, "mem_len": M, "dtype": dtype, "mb_read": mb} | taken


def require_transformer_xl(model: ModelConfig) -> None:
    """Require a Transformer-XL, whose FLOPs and memory are known here."""
    require(
        model.kind == "transformer_xl",
        f"model.kind={model.kind!r}: only a model of kind 'transformer_xl' can be measured",
    )


def reading_step(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"],
    targets: Int[Tensor, "B predicted"],
    lengths: Lengths,
    mems: Memory,
) -> Callable[[], object]:
    """Return a function that predicts a segment of each stream and updates the memory."""
    lengths = lengths._replace(segment_len=tokens.shape[1])

    def step() -> None:
        nonlocal mems
        (piece,) = read(model, tokens, lengths, mems, targets=targets)
        mems = piece.mems

    return step


def full_memory(model: LanguageModel, B: int, M: int) -> Memory:
    """Return a memory of M random positions for B streams."""
    shape = (B, M, model.config.d_model)
    return Memory([torch.randn(shape, device=model.device) for _ in range(model.config.n_layer)])
