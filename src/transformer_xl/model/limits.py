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

from transformer_xl.config import Config, ModelConfig
from transformer_xl.config.device import total_memory

if TYPE_CHECKING:
    from transformer_xl.model.language_model import LanguageModel
    from transformer_xl.model.segment import Lengths

FLOAT = 4
"""Bytes of a float32."""
_BORROWED = ("mamba2", "rwkv", "xlnet", "xlstm")
"""Kinds of models with layers of another library."""
_MOST_SECONDS = 120
"""Seconds that the modules of a model may take to be built."""
_TENSOR_SECONDS, _TENSOR_BYTES = 1.5e-4, 6_000
"""What a tensor takes, however small, measured: its module is built twice, once without numbers."""
_ANY_SIZE = "TXL_ANY_SIZE"
"""The environment variable that lifts the limits on loading, which child processes inherit."""
_LIFTING = threading.Lock()
_BEFORE: list[str | None] = []
"""What each block of :func:`any_size` that is not left yet has found in the variable."""
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def layer_matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """List (rows, columns) of the matrices of a layer, as Muon splits them."""
    D, F, width = config.d_model, config.d_inner, config.n_head * config.head_width
    if config.family == "lstm":
        return [(4 * D, D)] * 2
    if config.family == "rwkv":
        return [(D, D)] * 5 + [(F, D), (D, F)]
    if config.family == "xlnet":
        return [(D, D)] * 5 + [(F, D), (D, F)]
    if config.family == "xlstm":
        return [(D // 2, D)] * 2 + [(D, D)] * 3 + [(F, D)] * 2 + [(D, F)]
    if config.family == "mamba2":
        inner = config.expand * D
        return [(2 * (inner + config.state_size) + config.n_head, D), (D, inner)]
    has_r = config.family == "transformer_xl" and config.attn_type == 0
    n_projections = 4 if has_r else 3
    matrices = [(width, D)] * n_projections + [(D, width)]
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
    if config.family == "mamba2":
        # Depthwise: a weight for each feature and place.
        layer += (config.expand * config.d_model + 2 * config.state_size) * config.conv_width
    tables = table_numbers(config)
    if config.n_features:
        tables += config.d_model * (3 * config.n_mixtures or config.vocab_size)
    elif not config.tie_embeddings:
        tables *= 2
    of_heads = config.n_head * config.head_width
    row = of_heads if config.attn_type == 1 else config.d_model
    return config.n_layer * (layer + row * (config.n_positions or 0)) + tables


def state_bytes(config: ModelConfig, n_streams: int, mem_len: int) -> int:
    """Count the bytes of a memory in float32: of hidden states, or of a GPT's keys and values."""
    is_gpt = config.family == "gpt"
    width = 2 * config.n_head * config.head_width if is_gpt else config.d_model
    return FLOAT * config.n_layer * n_streams * mem_len * width


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


def require_remembering(model: "LanguageModel", lengths: "Lengths") -> None:
    """Require a model that remembers what it has read before a segment.

    Raises:
        ValueError: Its memory has no position.
    """
    if model.remembers_positions and not lengths.mem_len:
        raise ValueError(
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


def _named(settings: object, section: str, *names: str) -> dict[str, object]:
    """Return settings by their full names, without those that are None."""
    values = {f"{section}.{name}": getattr(settings, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def require_weights(config: ModelConfig) -> None:
    """Require that the weights of a model fit on the default device; meta passes.

    Layers of other libraries are also allocated elsewhere, so they have to fit on the CPU even so.

    Raises:
        ValueError: They do not fit.
    """
    device = torch.get_default_device()
    if config.family in _BORROWED and device.type == "meta":
        device = torch.device("cpu")
    if device.type != "meta":
        names = ("vocab_size", "n_layer", "n_head", "d_model", "d_inner")
        if config.family == "mamba2":
            names += ("state_size", "expand", "conv_width")
        settings = _named(config, "model", *names, "d_head", "d_embed", "n_positions")
        size = FLOAT * least_weights(config)
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
            # The last block to be left, of whichever thread, restores what the first one found.
            first = _BEFORE[0]
            _BEFORE.pop()
            if not _BEFORE:
                del os.environ[_ANY_SIZE]
                if first is not None:
                    os.environ[_ANY_SIZE] = first


class LoadingLimitError(ValueError):
    """A stored model would take more memory than there is, or too much time."""


def require_loading(
    config: ModelConfig, n_tensors: int, weights: Path, *, number_bytes: int = FLOAT
) -> None:
    """Require that a stored model can be loaded with the memory of this machine, in two minutes.

    Both are computed from the settings and the number of stored tensors before the model is built.
    The files take no memory of their own: they are mapped, and the system drops what it has read of
    them when it needs room. The time is that of the tensors, however small; that of their bytes,
    which are bounded by the memory, depends on the disk and is not limited. :func:`any_size` lifts
    the limits.

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
        "--any_size loads it all the same (in Python: with transformer_xl.model.limits.any_size(); "
        f"in other programs: {_ANY_SIZE}=1 in the environment)"
    )
    what = f"to load {weights}"
    needed = number_bytes * least_weights(config) + n_tensors * _TENSOR_BYTES
    try:
        require_bytes(what, needed, torch.device("cpu"), settings, lifted)
    except ValueError as error:
        raise LoadingLimitError(str(error)) from None
    seconds = n_tensors * _TENSOR_SECONDS
    if seconds > _MOST_SECONDS:
        raise LoadingLimitError(
            f"n_layer={config.n_layer}, n_tensors={n_tensors}: {what} would take about "
            f"{seconds:,.0f} s, and the limit is {_MOST_SECONDS} s: {lifted}"
        )


def require_training(
    config: Config, device: torch.device, *, n_streams: int, shards: int = 1
) -> None:
    """Require that a step of ``n_streams`` fits, with weights sharded over ``shards`` processes.

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
        _named(model, "model", "n_layer", "d_model", "d_inner", "vocab_size"),
        "make a smaller model",
    )
    T = max([train.segment_len, *(length for _, length, _ in train.stages)])
    M = max([model.mem_len, *(length for *_, length in train.stages)])
    if train.minutes is None and model.start_memory == "empty":
        # A memory is no longer than the text read so far.
        M = min(M, train.steps * T)
    sizes = _named(model, "model", "n_layer", "d_model")
    if model.has_attention or model.kind == "xlnet":
        require_bytes(
            "the memory",
            weights + state_bytes(model, n_streams, M),
            device,
            _named(model, "model", "mem_len") | _named(train, "train", "batch_size") | sizes,
            "shorten the memory, or read fewer streams",
        )
    # Inputs of layers are saved for the backward pass, even with activation checkpointing.
    n_read = n_streams // train.accumulate * (T + model.ext_len)
    drawn = FLOAT * model.sample_softmax * model.embed_width
    settings = _named(train, "train", "batch_size", "segment_len")
    require_bytes(
        "a step",
        weights + FLOAT * model.n_layer * n_read * model.d_model + drawn,
        device,
        settings | _named(model, "model", "ext_len", "sample_softmax") | sizes,
        "shorten the segments, read fewer streams, or raise train.accumulate",
    )


def require_reading(
    model: "LanguageModel", n_tokens: int, *, batch_size: int, segment_len: int, mem_len: int
) -> None:
    """Require that an evaluation of ``n_tokens`` fits, which bound the length of the memory.

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


def require_capacity(
    model: "LanguageModel", mem_len: int, *, remedy: str, n_streams: int = 1
) -> None:
    """Require that a full memory of every stream fits, with the scores of their next tokens.

    Raises:
        ValueError: It does not fit.
    """
    config = model.config
    texts, each = {}, full_memory(model, mem_len)
    if n_streams > 1:
        texts = {"texts": n_streams}
        each += config.vocab_size * torch.float32.itemsize
    require_bytes(
        "the memory, once full,",
        n_streams * each,
        model.device,
        {**texts, "mem_len": mem_len, "n_layer": config.n_layer, "d_model": config.d_model},
        remedy,
    )


def readable(n_bytes: int) -> str:
    """Format a number of bytes with a unit."""
    power = min(max(int(math.log10(max(n_bytes, 1))) // 3, 0), len(_UNITS) - 1)
    return f"{n_bytes / 1000**power:,.3g} {_UNITS[power]}"
