"""Lower bounds of memory use, and errors for settings that exceed the machine.

All bounds are formulas of the settings, so nothing is allocated. They are conservative: settings
that pass may still run out of memory, but settings that are refused never fit.
:mod:`transformer_xl.apps.estimate` estimates actual use.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from transformer_xl.config import Config, ModelConfig
from transformer_xl.config.device import total_memory

if TYPE_CHECKING:
    from transformer_xl.model.language_model import LanguageModel

FLOAT = 4
"""Bytes of a float32."""
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def layer_matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """List (rows, columns) of the matrices of a layer, as Muon splits them."""
    D, F, width = config.d_model, config.d_inner, config.n_head * config.head_width
    if not config.has_attention:
        return [(4 * D, D)] * 2
    n_projections = 4 if config.attn_type == 0 else 3
    matrices = [(width, D)] * n_projections + [(D, width)]
    matrices += [(F, D)] * (1 + config.is_gated) + [(D, F)]
    return matrices + [(D, D)] * (12 if config.gate == "gru" else 0)


def table_numbers(config: ModelConfig) -> int:
    """Count the parameters of the token embeddings."""
    return sum((x.stop - x.start) * x.width for x in config.clusters) if config.vocab_size else 0


def least_weights(config: ModelConfig) -> int:
    """Count the parameters of matrices and embeddings: nearly all of a model."""
    layer = sum(rows * columns for rows, columns in layer_matrices(config))
    tables = table_numbers(config) * (1 if config.tie_embeddings else 2)
    of_heads = config.n_head * config.head_width
    row = of_heads if config.attn_type == 1 else config.d_model
    return config.n_layer * (layer + row * (config.n_positions or 0)) + tables


def state_bytes(config: ModelConfig, n_streams: int, mem_len: int) -> int:
    """Count the bytes of a memory of hidden states in float32."""
    return FLOAT * config.n_layer * n_streams * mem_len * config.d_model


def most_positions(model: "LanguageModel", mem_len: int) -> int:
    """Return the length of a full memory; 1 for a single recurrent state."""
    return mem_len if model.remembers_positions else 1


def require_mem_len(model: "LanguageModel", mem_len: object) -> None:
    """Require ``mem_len`` None for a model with a single recurrent state.

    Raises:
        ValueError: ``mem_len`` would have no effect.
    """
    if mem_len is not None and not model.remembers_positions:
        raise ValueError(
            f"mem_len={mem_len} has no effect with kind={model.kind!r}, which remembers one state "
            "of all that it has read; leave it out"
        )


def full_memory(model: "LanguageModel", mem_len: int) -> int:
    """Return the bytes of a full memory of one stream."""
    start = model.keep(model.start_memory(1, 0)).state_dict()
    start.pop("forgotten")
    places = most_positions(model, mem_len)
    shapes = [(*x.shape[:-2], places, x.shape[-1]) for x in start.values()]
    sizes = [x.element_size() for x in start.values()]
    return sum(math.prod(shape) * size for shape, size in zip(shapes, sizes, strict=True))


def require_bytes(
    what: str, n_bytes: int, device: torch.device, settings: Mapping[str, object], remedy: str
) -> None:
    """Require that a device has enough memory.

    Args:
        what: What is to be allocated.
        n_bytes: Lower bound of its size.
        device: Where it is to be allocated.
        settings: The settings that determine the size, by name.
        remedy: What to do instead.

    Raises:
        ValueError: The device has less memory.
    """
    there = total_memory(device)
    if there is not None and n_bytes > there:
        named = ", ".join(f"{name}={value}" for name, value in settings.items())
        where = "this machine" if device.type == "cpu" else f"the {device.type} device"
        raise ValueError(
            f"{named}: {what} would take at least {readable(n_bytes)}, and {where} has "
            f"{readable(there)}: {remedy}"
        )


def require_weights(config: ModelConfig) -> None:
    """Require that the weights of a model fit on the default device; meta passes.

    Raises:
        ValueError: They do not fit.
    """
    device = torch.get_default_device()
    if device.type != "meta":
        names = ("vocab_size", "n_layer", "n_head", "d_model", "d_inner")
        settings = {f"model.{name}": getattr(config, name) for name in names}
        for name in ("d_head", "d_embed", "n_positions"):
            if (value := getattr(config, name)) is not None:
                settings[f"model.{name}"] = value
        require_bytes(
            "the weights", FLOAT * least_weights(config), device, settings, "make a smaller model"
        )


def require_training(
    config: Config, device: torch.device, *, n_streams: int, shards: int = 1
) -> None:
    """Require that a training step fits.

    Args:
        config: The recipe.
        device: Where it trains.
        n_streams: Streams of this process.
        shards: Number of processes over which weights are sharded.

    Raises:
        ValueError: It does not fit.
    """
    model, train = config.model, config.train
    require_weights(model)
    # Weights, gradients and optimizer state, of which Muon has the least: one value per weight.
    weights = FLOAT * least_weights(model) * 3 // shards
    require_bytes(
        "weights, gradients and optimizer",
        weights,
        device,
        {"model.n_layer": model.n_layer, "model.d_model": model.d_model}
        | {"model.d_inner": model.d_inner, "model.vocab_size": model.vocab_size},
        "make a smaller model",
    )
    T = max([train.segment_len, *(length for _, length, _ in train.stages)])
    M = max([model.mem_len, *(length for *_, length in train.stages)])
    if train.minutes is None and model.start_memory == "empty":
        # A memory is no longer than the text read so far.
        M = min(M, train.steps * T)
    n_read = n_streams // train.accumulate * (T + model.ext_len)
    drawn = model.sample_softmax * (FLOAT * model.embed_width)
    sizes = {"model.n_layer": model.n_layer, "model.d_model": model.d_model}
    if model.has_attention:
        require_bytes(
            "the memory",
            weights + state_bytes(model, n_streams, M),
            device,
            {"model.mem_len": model.mem_len, "train.batch_size": train.batch_size} | sizes,
            "shorten the memory, or read fewer streams",
        )
    # Inputs of layers are saved for the backward pass, even with activation checkpointing.
    require_bytes(
        "a step",
        weights + FLOAT * model.n_layer * n_read * model.d_model + drawn,
        device,
        {"train.batch_size": train.batch_size, "train.segment_len": train.segment_len}
        | {"model.ext_len": model.ext_len, "model.sample_softmax": model.sample_softmax}
        | sizes,
        "shorten the segments, read fewer streams, or raise train.accumulate",
    )


def require_reading(
    model: "LanguageModel", n_tokens: int, *, batch_size: int, segment_len: int, mem_len: int
) -> None:
    """Require that an evaluation fits.

    Args:
        model: The model.
        n_tokens: Tokens of the text, which bound the length of the memory.
        batch_size: Number of parts of the text in a batch.
        segment_len: Segment length.
        mem_len: Memory length.

    Raises:
        ValueError: It does not fit.
    """
    config, B = model.config, max(min(batch_size, n_tokens), 1)
    longest = -(-n_tokens // B)
    remembered = min(mem_len, longest * min(B, 2))
    if config.start_memory == "zeros":
        remembered = mem_len
    require_bytes(
        "the memory",
        B * full_memory(model, remembered),
        model.device,
        {"mem_len": mem_len, "batch_size": batch_size, "n_layer": config.n_layer},
        "shorten the memory, or lower the batch size",
    )
    require_bytes(
        "a segment",
        FLOAT * B * min(segment_len, longest) * config.d_model,
        model.device,
        {"segment_len": segment_len, "batch_size": batch_size, "d_model": config.d_model},
        "shorten the segments, or lower the batch size",
    )


def require_capacity(model: "LanguageModel", mem_len: int, *, remedy: str) -> None:
    """Require that a full memory of one stream fits.

    Raises:
        ValueError: It does not fit.
    """
    config = model.config
    require_bytes(
        "the memory, once full,",
        full_memory(model, mem_len),
        model.device,
        {"mem_len": mem_len, "n_layer": config.n_layer, "d_model": config.d_model},
        remedy,
    )


def readable(n_bytes: int) -> str:
    """Format a number of bytes with a unit."""
    power = min(max(int(math.log10(max(n_bytes, 1))) // 3, 0), len(_UNITS) - 1)
    return f"{n_bytes / 1000**power:,.3g} {_UNITS[power]}"
