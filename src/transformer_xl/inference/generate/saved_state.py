"""What a text goes on from, in a file."""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int, UInt8
from torch import Tensor

from transformer_xl.config import FORMAT_VERSION
from transformer_xl.inference.generate.batch import Generation
from transformer_xl.model import LanguageModel, Memory
from transformer_xl.model.pretrained import verified_tensors, weights_checksum, write_tensors

_POSITIONED = ("states", "keys", "values")


class State(NamedTuple):
    """What a text goes on from."""

    mems: Memory
    """The memory, which has read all tokens but the last."""
    last_token: int
    """That token."""
    random: UInt8[Tensor, " bytes"] | None
    """The state of the random numbers; None where there are none, or in a file of old."""
    offset: int = 0
    """How many tokens of a segment that goes on the memory has read."""
    read: Int[Tensor, " n"] | None = None
    """The last tokens that the memory has read, for those who show them; None: not known."""


def save_state(path: Path, generation: Generation, weights: Path | str) -> None:
    """Write what is needed to go on with a text to a safetensors file, atomically.

    Args:
        path: The file.
        generation: What was written so far.
        weights: The weights file of the model, to which the memory belongs, or its checksum.
    """
    state = State(generation.mems, generation.last_token, generation.random_state)
    write_state(path, state, weights)


def write_state(path: Path, state: State, weights: Path | str, *, positions: int = 0) -> None:
    """Write a state to a safetensors file, atomically.

    Args:
        path: The file.
        state: What is written.
        weights: The weights file of the model, to which the memory belongs; or, where it may be
            replaced while the model is used, the SHA-256 that it had when the model was loaded.
        positions: Room for so many positions: files of the same room are of the same size,
            however much is remembered yet.
    """
    unused = max(positions - len(state.mems), 0)
    found = state.mems.state_dict() | {"random": state.random, "read": state.read}
    tensors = {name: x.contiguous() for name, x in found.items() if x is not None}
    # Numbers of one width: the header, too, has the same size at any time.
    about = {
        "format_version": str(FORMAT_VERSION),
        "last_token": f"{state.last_token:012}",
        "offset": f"{state.offset:012}",
        "unused": f"{unused:012}",
        "weights": weights_checksum(weights),
    }
    if unused:
        tensors |= {
            name: F.pad(x, (0, 0, unused, 0)) for name, x in tensors.items() if name in _POSITIONED
        }
    write_tensors(tensors, path, about)


def load_state(path: Path, weights: Path | str, model: LanguageModel | None = None) -> State:
    """Read what a text goes on from.

    Args:
        path: The file.
        weights: As for :func:`write_state`.
        model: The model that will read it: what does not fit is refused, and the memory comes
            where the model is, in its precision (it may have been written in another). None: as
            it is in the file.

    Raises:
        OSError: The file is not there, or a folder.
        RuntimeError: The file is damaged or of a newer version.
        ValueError: The memory belongs to another model.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file")
    tensors, about = verified_tensors(path)
    # Copied, because the last digits of products depend on where in memory a tensor begins, and in
    # the file that depends on the length of the header.
    tensors = {name: x.clone() for name, x in tensors.items()}
    try:
        version, belongs_to = int(about["format_version"]), about["weights"]
        last_token, offset = int(about["last_token"]), int(about.get("offset", 0))
        unused = int(about.get("unused", 0))
        if offset < 0 or unused < 0:
            raise ValueError(f"offset={offset}, unused={unused}")
        random = tensors.pop("random", None)
        if random is not None:
            torch.Generator().set_state(random)
        read = tensors.pop("read", None)
        memory = Memory.from_state_dict(
            {"forgotten": None}
            | {
                name: x[..., unused:, :] if name in _POSITIONED else x
                for name, x in tensors.items()
            }
        )
    except (KeyError, ValueError, IndexError, TypeError, RuntimeError) as error:
        raise RuntimeError(f"{path} is damaged or holds no memory: {error}") from error
    if version > FORMAT_VERSION:
        raise RuntimeError(
            f"{path} has format {version}; this version reads up to {FORMAT_VERSION}: "
            "update transformer_xl"
        )
    if belongs_to != weights_checksum(weights):
        this = weights if isinstance(weights, Path) else "this one"
        raise ValueError(f"the memory in {path} was made by another model than {this}")
    state = State(memory, last_token, random, offset, read)
    if model is None:
        return state
    if not _fits(state, model):
        raise RuntimeError(f"{path} is damaged: no text of this model goes on from it")
    return state._replace(mems=memory.to(model.device, model.dtype))


def _fits(state: State, model: LanguageModel) -> bool:
    """Whether a state is one of a model: who reads a wrong one fails with all beside it."""
    empty = model.start_memory(1, 1)
    expected = model.keep(empty) if state.mems.has_keys else empty
    tokens, forgotten = torch.tensor([state.last_token]), state.mems.forgotten
    if state.read is not None:
        tokens = torch.cat([tokens, state.read.flatten()])
    return (
        _shapes(state.mems) == _shapes(expected)
        and len({x.shape for x in state.mems.tensors}) == 1
        and all(x.is_floating_point() for x in state.mems.tensors)
        and bool(((tokens >= 0) & (tokens < model.config.vocab_size)).all())
        and (forgotten is None or (forgotten.shape == (1,) and not forgotten.is_floating_point()))
        and (forgotten is None or 0 <= int(forgotten) <= len(state.mems))
    )


def _shapes(mems: Memory) -> list[tuple[int, ...]]:
    # But for how much is remembered.
    return [(*x.shape[:-2], x.shape[-1]) for x in mems.tensors]
