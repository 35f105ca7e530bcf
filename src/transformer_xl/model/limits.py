"""Lower bounds of memory use, and errors for settings that exceed the machine.

All bounds are formulas of the settings, so nothing is allocated. They are conservative: settings
that pass may still run out of memory, but settings that are refused never fit.
"""

import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from transformer_xl.config import Config, ModelConfig, total_memory
from transformer_xl.errors import SettingsError

if TYPE_CHECKING:
    from transformer_xl.model.language_model import LanguageModel
    from transformer_xl.model.segment import Lengths

_FLOAT = 4
"""Bytes of a float32."""
_MOST_SECONDS = 120
"""Seconds that the modules of a model may take to be built."""
_TENSOR_SECONDS, _TENSOR_BYTES = 1.5e-4, 6_000
"""What a tensor takes, however small, measured: its module is built twice, once without numbers."""
_ANY_SIZE = "TXL_ANY_SIZE"
"""The environment variable that lifts the limits on loading, which child processes inherit."""
_LIFTING = threading.Lock()
_BEFORE: list[str | None] = []
"""The values of the variable before each block of :func:`any_size` that was not left yet."""


def layer_matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """List (rows, columns) of the matrices of a layer, as Muon splits them."""
    D, F, width = config.d_model, config.d_inner, config.n_head * config.head_width
    if config.family == "lstm":
        return [(4 * D, D)] * 2
    has_r = config.family == "transformer_xl" and config.attn_type == 0
    matrices = [(width, D)] * (3 + has_r) + [(D, width)]
    matrices += [(F, D)] * (1 + config.is_gated) + [(D, F)]
    return matrices + [(D, D)] * (12 if config.gate == "gru" else 0)


def table_numbers(config: ModelConfig) -> int:
    """Count the parameters of the embeddings, without their projections."""
    if config.n_features:
        return config.n_features * config.d_model
    return sum((x.stop - x.start) * x.width for x in config.clusters) if config.vocab_size else 0


def least_weights(config: ModelConfig) -> int:
    """Count the parameters of matrices and embeddings: nearly all of a model."""
    layer = sum(rows * columns for rows, columns in layer_matrices(config))
    row = config.n_head * config.head_width if config.attn_type == 1 else config.d_model
    layer += row * (config.n_positions or 0)
    tables = table_numbers(config)
    if config.n_features:
        tables += config.d_model * (3 * config.n_mixtures or config.vocab_size)
    elif not config.tie_embeddings:
        tables *= 2
    return config.n_layer * layer + tables


def most_positions(model: "LanguageModel", mem_len: int) -> int:
    """Return the length of a full memory; 1 for a single recurrent state."""
    return mem_len if model.remembers_positions else 1


def require_mem_len(model: "LanguageModel", mem_len: object) -> None:
    """Require ``mem_len`` None for a model with a single recurrent state.

    Raises:
        SettingsError: ``mem_len`` would have no effect.
    """
    if mem_len is not None and not model.remembers_positions:
        raise SettingsError(
            f"mem_len={mem_len} has no effect with kind={model.kind!r}, which remembers one state "
            "of all that it has read; leave it out"
        )


def require_remembering(model: "LanguageModel", lengths: "Lengths") -> None:
    """Require a model that remembers what it has read before a segment.

    Raises:
        SettingsError: Its memory has no position.
    """
    if model.remembers_positions and not lengths.mem_len:
        raise SettingsError(
            "mem_len=0: nothing is remembered from segment to segment; give a mem_len, such as the "
            "context of the training"
        )


def full_memory(model: "LanguageModel", mem_len: int) -> int:
    """Return the bytes of a full memory of one stream."""
    start = model.keep(model.start_memory(1, 0)).tensors
    widths = [math.prod(x.shape[:-2]) * x.shape[-1] * x.element_size() for x in start]
    return most_positions(model, mem_len) * sum(widths)


def require_bytes(
    what: str, n_bytes: int, device: torch.device, settings: Mapping[str, object], remedy: str
) -> None:
    """Require that a device has ``n_bytes``, a lower bound, for what these settings allocate.

    Raises:
        SettingsError: The device has less memory.
    """
    there = total_memory(device)
    if there is not None and n_bytes > there:
        named = ", ".join(f"{name}={value}" for name, value in settings.items())
        where = "this machine" if device.type == "cpu" else f"the {device.type} device"
        raise SettingsError(
            f"{named}: {what} would take at least {readable(n_bytes)}, and {where} has "
            f"{readable(there)}: {remedy}"
        )


def _named(settings: object, section: str, *names: str) -> dict[str, object]:
    """Return settings by their full names, without those that are not set."""
    return {f"{section}.{name}": x for name in names if (x := getattr(settings, name))}


def require_weights(config: ModelConfig) -> None:
    """Require that the weights of a model fit on the default device; meta passes.

    Raises:
        SettingsError: They do not fit.
    """
    device = torch.get_default_device()
    if device.type != "meta":
        names = ("vocab_size", "n_layer", "n_head", "d_model", "d_inner", "d_head", "d_embed")
        settings = _named(config, "model", *names, "n_positions")
        size = _FLOAT * least_weights(config)
        require_bytes("the weights", size, device, settings, "make a smaller model")


@contextmanager
def any_size() -> Iterator[None]:
    """Load models inside a ``with`` block however much memory and time that takes.

    It holds for all threads of this process, and for processes that are started inside.
    """
    with _LIFTING:
        _BEFORE.append(os.environ.get(_ANY_SIZE))
        os.environ[_ANY_SIZE] = "1"
    try:
        yield
    finally:
        with _LIFTING:
            # The last block to be left, of whichever thread, restores the value of the first one.
            first = _BEFORE[0]
            _BEFORE.pop()
            if not _BEFORE:
                del os.environ[_ANY_SIZE]
                if first is not None:
                    os.environ[_ANY_SIZE] = first


class LoadingLimitError(SettingsError):
    """A stored model would take more memory than there is, or too much time."""


def require_loading(
    config: ModelConfig, n_tensors: int, weights: Path, *, number_bytes: int = _FLOAT
) -> None:
    """Require that a stored model can be loaded with the memory of this machine, in two minutes.

    Both are computed before the model is built. Files take no memory of their own: they are mapped.
    The time is that of the tensors, however small; that of their bytes depends on the disk and is
    not limited. :func:`any_size` lifts the limits.

    Args:
        config: The settings of the model.
        n_tensors: How many tensors the headers of the files name.
        weights: From :func:`~transformer_xl.model.pretrained.weights_path`.
        number_bytes: Bytes of a parameter once it is loaded, at least.

    Raises:
        OverflowError: There are more layers than tensors.
        LoadingLimitError: It takes more.
    """
    if config.n_layer > n_tensors:
        raise OverflowError(f"n_layer={config.n_layer}")
    if os.environ.get(_ANY_SIZE):
        return
    settings: dict[str, object] = {"n_layer": config.n_layer, "n_tensors": n_tensors}
    lifted = (
        "--any_size loads it all the same (in Python: with transformer_xl.model.any_size(); "
        f"in other programs: {_ANY_SIZE}=1 in the environment)"
    )
    needed = number_bytes * least_weights(config) + n_tensors * _TENSOR_BYTES
    try:
        require_bytes(f"to load {weights}", needed, torch.device("cpu"), settings, lifted)
    except SettingsError as error:
        raise LoadingLimitError(str(error)) from None
    seconds = n_tensors * _TENSOR_SECONDS
    if seconds > _MOST_SECONDS:
        raise LoadingLimitError(
            f"n_layer={config.n_layer}, n_tensors={n_tensors}: to load {weights} would take about "
            f"{seconds:,.0f} s, and the limit is {_MOST_SECONDS} s: {lifted}"
        )


def require_training(
    config: Config, device: torch.device, *, n_streams: int, shards: int = 1
) -> None:
    """Require that a step of ``n_streams`` fits, with weights sharded over ``shards`` processes.

    Raises:
        SettingsError: It does not fit.
    """
    model, train = config.model, config.train
    require_weights(model)
    T = max([train.segment_len, *(length for _, length, _ in train.stages)])
    M = max([model.mem_len, *(length for *_, length in train.stages)])
    if train.minutes is None and model.start_memory == "empty":
        # A memory is no longer than the text read so far.
        M = min(M, train.steps * T)
    width = 2 * model.n_head * model.head_width if model.family == "gpt" else model.d_model
    memory = n_streams * M * width if model.has_attention else 0
    # Inputs of layers are saved for the backward pass, even with activation checkpointing.
    saved = n_streams // train.accumulate * (T + model.ext_len) * model.d_model
    # Weights, gradients and optimizer state, of which Muon has the least: one value per weight.
    numbers = least_weights(model) * 3 // shards + model.n_layer * (memory + saved)
    names = ("mem_len", "ext_len", "n_layer", "d_model", "d_inner", "vocab_size", "sample_softmax")
    require_bytes(
        "a step",
        _FLOAT * (numbers + model.sample_softmax * model.embed_width),
        device,
        _named(train, "train", "batch_size", "segment_len") | _named(model, "model", *names),
        "shorten the memory or the segments, read fewer streams, raise train.accumulate, or make a "
        "smaller model",
    )


def require_capacity(
    model: "LanguageModel", mem_len: int, *, remedy: str, n_streams: int = 1
) -> None:
    """Require that a full memory of every stream fits, with the scores of their next tokens.

    Raises:
        SettingsError: It does not fit.
    """
    config = model.config
    texts, scores = ({"texts": n_streams}, config.vocab_size) if n_streams > 1 else ({}, 0)
    require_bytes(
        "the memory, once full,",
        n_streams * (full_memory(model, mem_len) + _FLOAT * scores),
        model.device,
        {**texts, "mem_len": mem_len, "n_layer": config.n_layer, "d_model": config.d_model},
        remedy,
    )


def readable(n_bytes: int) -> str:
    """Format a number of bytes with a unit."""
    units = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
    power = min(max(int(math.log10(max(n_bytes, 1))) // 3, 0), len(units) - 1)
    return f"{n_bytes / 1000**power:,.3g} {units[power]}"
