"""The state of a text, from which it can be continued, as a file or as bytes."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int, UInt8
from torch import Tensor

from transformer_xl.config import FORMAT_VERSION, GenerateConfig
from transformer_xl.errors import CheckpointError, InputError
from transformer_xl.inference.generate.batch import Generation, random_numbers
from transformer_xl.model import LanguageModel, Memory, WeightsFiles, read_tensors, write_tensors

_POSITIONED = ("states", "keys", "values", "inputs")


class State(NamedTuple):
    """The state of a text, from which it can be continued."""

    mems: Memory
    """The memory of all tokens but the last."""
    last_token: int
    """The last token, not read yet."""
    random: UInt8[Tensor, " bytes"] | None
    """The state of the random number generator; None: no sampling, or a file of an old version."""
    offset: int = 0
    """How many tokens of an incomplete segment are in the memory."""
    read: Int[Tensor, " n"] | None = None
    """The last tokens in the memory, for penalties and for display; None: unknown."""
    note: str = ""
    """A text that a program keeps with it."""

    @classmethod
    def of(cls, text: Generation) -> "State":
        """Return the state of a generation."""
        read = torch.from_numpy(text.history)
        return cls(text.mems, text.last_token, text.random_state, read=read)

    @staticmethod
    def largest(
        model: LanguageModel, mem_len: int, n_tokens: int = GenerateConfig.MAX_HISTORY
    ) -> int:
        """Return the maximum bytes of a state: memory, last tokens, and random numbers."""
        random = random_numbers(0).get_state()
        return model.memory_bytes(mem_len) + n_tokens * np.dtype(np.int32).itemsize + random.nbytes


def save_state(
    path: Path, text: Generation | State, weights: Path | str, *, positions: int = 0
) -> None:
    """Write the state of a text to a safetensors file, atomically.

    Args:
        path: The file.
        text: The generation, or its state.
        weights: The weights file of the model, which :func:`load_state` compares; or, if the file
            may have been replaced since, its SHA-256 at the time of loading.
        positions: Pad the memory to this length, so that all files have the same size, and the
            tokens in it to 4,096.

    Example:
        >>> from transformer_xl import from_pretrained, generate, shipped_path
        >>> model, vocab = from_pretrained("shakespeare")
        >>> weights = shipped_path("shakespeare") / "model.safetensors"
        >>> save_state(Path("romeo.safetensors"), generate(model, vocab.encode("ROMEO:")), weights)
    """
    state = text if isinstance(text, State) else State.of(text)
    unused, read = max(positions - len(state.mems), 0), state.read
    n_read = 0 if read is None else len(read)
    if read is not None and positions:
        read = F.pad(read, (max(GenerateConfig.MAX_HISTORY - n_read, 0), 0))
    values = state.mems.state_dict() | {"random": state.random, "read": read}
    tensors = {name: x.contiguous() for name, x in values.items() if x is not None}
    if unused:
        for name in tensors.keys() & _POSITIONED:
            tensors[name] = F.pad(tensors[name], (0, 0, unused, 0))
    numbers = {"last_token": state.last_token, "offset": state.offset}
    numbers |= {"unused": unused, "n_read": n_read}
    about = {
        "format_version": str(FORMAT_VERSION),
        # Zero-padded, so that the header has a constant size.
        **{name: f"{number:012}" for name, number in numbers.items()},
        "weights": _checksum_of(weights),
    }
    write_tensors(tensors, path, about | ({"note": state.note} if state.note else {}))


def load_state(
    path: Path, weights: Path | str, model: LanguageModel | None = None, *, follow: bool = True
) -> State:
    """Load and verify a state.

    Args:
        path: The file.
        weights: As for :func:`save_state`.
        model: The model that will use it: shapes are validated, and the memory is moved to its
            device and precision. None: the state is returned as stored.
        follow: Whether the file, or the folder that it is in, may be a symbolic link.

    Raises:
        OSError: The file does not exist, or is no regular file.
        RuntimeError: The file is damaged or of a newer version.
        ValueError: The state belongs to another model.

    Example:
        >>> from transformer_xl import from_pretrained, generate, shipped_path
        >>> from transformer_xl.inference.generate import Sampling
        >>> model, vocab = from_pretrained("shakespeare")
        >>> greedy, prompt = Sampling(temperature=0), vocab.encode("ROMEO:")
        >>> generation = generate(model, prompt, greedy, length=5)
        >>> tokens = list(generation)
        >>> weights = shipped_path("shakespeare") / "model.safetensors"
        >>> save_state(Path("romeo.safetensors"), generation, weights)
        >>> state = load_state(Path("romeo.safetensors"), weights, model)
        >>> again = generate(model, [state.last_token], greedy, length=1, mems=state.mems)
        >>> tokens + list(again) == list(generate(model, prompt, greedy, length=6))
        True
    """
    tensors, about = read_tensors(path, follow=follow)
    # Copied, because rounding in products depends on the alignment of tensors, and in the file that
    # depends on the length of the header.
    tensors = {name: x.clone() for name, x in tensors.items()}
    try:
        version, belongs_to = int(about["format_version"]), about["weights"]
        last_token, offset = int(about["last_token"]), int(about.get("offset", 0))
        unused = int(about.get("unused", 0))
        random, read = tensors.pop("random", None), tensors.pop("read", None)
        n_read = int(about.get("n_read", 0 if read is None else len(read)))
        if min(offset, unused, n_read) < 0 or (read is not None and n_read > len(read)):
            raise ValueError(f"offset={offset}, unused={unused}, n_read={n_read}")
        read = None if read is None else read[len(read) - n_read :]
        if random is not None:
            torch.Generator().set_state(random)
        for name in tensors.keys() & _POSITIONED:
            tensors[name] = tensors[name][..., unused:, :]
        mems = Memory.from_state_dict({"forgotten": None} | tensors)
        state = State(mems, last_token, random, offset, read, about.get("note", ""))
    except (KeyError, ValueError, IndexError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged or holds no memory: {error}") from error
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {version}; this version reads up to {FORMAT_VERSION}: "
            "update transformer_xl"
        )
    if belongs_to != _checksum_of(weights):
        this = weights if isinstance(weights, Path) else "this one"
        raise InputError(f"the memory in {path} was made by another model than {this}")
    if model is None:
        return state
    # A wrong one would fail a whole batch of the server.
    tokens = torch.tensor([last_token])
    if read is not None:
        tokens = torch.cat([tokens, read.flatten()])
    is_known = bool(((tokens >= 0) & (tokens < model.config.vocab_size)).all())
    if not (is_known and model.is_own(mems) and mems.batch_size == 1):
        raise CheckpointError(f"{path} is damaged: no text of this model goes on from it")
    return state._replace(mems=mems.to(model.device, model.dtype))


def _checksum_of(weights: Path | str) -> str:
    return weights if isinstance(weights, str) else WeightsFiles(weights).checksum
