"""What a text goes on from, in a file."""

from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import UInt8
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from transformer_xl.config import FORMAT_VERSION
from transformer_xl.files import checksum, write_atomically
from transformer_xl.generate.batch import Generation
from transformer_xl.nn import KeptMemory, Memory


class State(NamedTuple):
    """What a text goes on from."""

    mems: Memory | KeptMemory
    """The memory, which has read all tokens but the last."""
    last_token: int
    """That token."""
    random: UInt8[Tensor, " bytes"] | None
    """The state of the random numbers; None in a file of an older version."""


def save_state(path: Path, generation: Generation, weights: Path) -> None:
    """Write what is needed to go on with a text to a safetensors file, atomically.

    Args:
        path: The file.
        generation: What was written so far.
        weights: The weights file of the model, to which the memory belongs.
    """
    state = generation.mems.state_dict() | {"random": generation.random_state}
    tensors = {name: x.contiguous() for name, x in state.items() if x is not None}
    about = {
        "format_version": str(FORMAT_VERSION),
        "last_token": str(generation.last_token),
        "weights": checksum(weights),
    }
    write_atomically(path, lambda temporary: save_file(tensors, temporary, about))


def load_state(path: Path, weights: Path) -> State:
    """Read what a text goes on from.

    Raises:
        RuntimeError: The file is damaged or of a newer version.
        ValueError: The memory belongs to another model.
    """
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        version, belongs_to = int(about["format_version"]), about["weights"]
        last_token = int(about["last_token"])
        random = tensors.pop("random", None)
        if random is not None:
            torch.Generator().set_state(random)
        kind = Memory if "states" in tensors else KeptMemory
        memory = kind.from_state_dict({"forgotten": None, **tensors})
    except (SafetensorError, KeyError, ValueError, IndexError, TypeError, RuntimeError) as error:
        raise RuntimeError(f"{path} is damaged or holds no memory: {error}") from error
    if version > FORMAT_VERSION:
        raise RuntimeError(
            f"{path} has format {version}; this version reads up to {FORMAT_VERSION}: "
            "update transformer_xl"
        )
    if belongs_to != checksum(weights):
        raise ValueError(f"the memory in {path} was made by another model than {weights}")
    return State(memory, last_token, random)
