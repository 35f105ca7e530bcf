"""Names of models: a folder, a shipped model, or ``OWNER/NAME`` of the Hugging Face hub.

Whatever takes a model takes such a name, and :func:`locate` is the only place that resolves it, in
this order. The hub is asked only for a name that has the form of one, and whose first part is no
local folder or one that runs and models are usually in, so that the path of a run that is missing
stays a path.
"""

import json
import re
from contextlib import suppress
from functools import cache
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from transformer_xl.config.config import MODEL_TYPE
from transformer_xl.config.shipped import ShippedModel, hint
from transformer_xl.errors import CheckpointError, InputError

# What a model folder or a run folder has at least one of.
_MARKS = ("config.json", "vocab.json", "recipe.toml", "model", "checkpoints")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
# Folders in the examples of this package. Of the hub they are no owners.
_LOCAL = ("runs", "models")
# No pickles, and no code.
_HUB_FILES = (
    *("config.json", "model.safetensors", "model.safetensors.index.json"),
    *("model-*-of-*.safetensors", "vocab.json", "tokenizer.json", "recipe.toml", "README.md"),
)
_REMEDY = "give a model folder, a run folder, a shipped model, or OWNER/NAME of the hub"


class Located(NamedTuple):
    """Where a model is."""

    path: Path
    """A folder; or a file, if the name is the path of one."""
    remark: str = ""
    """Which model the name means, where the name is not simply a path."""
    is_path: bool = True
    """Whether the name is a path of the caller, whose contents may change."""


def locate(name: Path | str) -> Located:
    """Resolve the name of a model: a path, a shipped model, or ``OWNER/NAME`` of the hub.

    Raises:
        FileNotFoundError: There is no such model.
        OSError: The hub cannot be reached, or refuses.
        InputError: The name is empty, or no name at all.
        CheckpointError: The model on the hub is none of this package, or huggingface_hub is
            missing.
    """
    if (here := locate_here(name)) is not None:
        return here
    text = Path(name).as_posix()
    if may_be_on_hub(name):
        folder = _download(text)
        remark = f"using {text} from the Hugging Face hub (revision {folder.name[:12]})"
        return Located(folder, remark, is_path=False)
    raise FileNotFoundError(f"{name} does not exist: {_REMEDY} ({hint(text)})")


def locate_here(name: Path | str) -> Located | None:
    """Resolve the name of a model without the hub; None if there is neither path nor model.

    Raises:
        InputError: The name is empty, as a variable that is not set, or no name at all.
    """
    if not isinstance(name, str | PathLike) or not str(name):
        raise InputError(f"{name!r} is no name of a model: {_REMEDY}")
    path = Path(name)
    # The text itself: ./python-code is a path.
    model = ShippedModel.find(str(name))
    if path.exists() and (model is None or any((path / mark).exists() for mark in _MARKS)):
        other = f"using the folder {name}, not the shipped model"
        return Located(path, f"{other} {model.full_name}" if model else "")
    return None if model is None else Located(model.folder, model.using, is_path=False)


def may_be_on_hub(name: Path | str) -> bool:
    """Whether a name is to be looked up on the hub if there is no such path."""
    # The text as it was given: ./OWNER/NAME is a path.
    text = name if isinstance(name, str) else name.as_posix()
    owner = Path(name).parent
    return bool(_HUB_NAME.fullmatch(text)) and owner.name not in _LOCAL and not owner.exists()


@cache
def _download(name: str) -> Path:
    """Return the folder in the hub's cache with the files of a model that are needed."""
    kind = None
    try:
        from huggingface_hub import errors, snapshot_download
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{name} is no folder; to download it from the Hugging Face hub, "
            "pip install 'transformer-xl[hf]'"
        ) from error
    try:
        # First, as weights of other models may be large.
        folder = Path(snapshot_download(name, allow_patterns=["config.json"]))
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
        if kind == MODEL_TYPE:
            folder = Path(snapshot_download(name, allow_patterns=[*_HUB_FILES]))
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{name} is neither a folder nor on the Hugging Face hub, or it can be read only after "
            f"hf auth login: {_REMEDY}"
        ) from error
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise OSError(
            f"{name} is no folder, and cannot be downloaded from the Hugging Face hub: {why}"
        ) from error
    if kind != MODEL_TYPE or not any(folder.glob("model*.safetensors")):
        raise CheckpointError(
            f"{name} on the Hugging Face hub is of type {kind!r}, not {MODEL_TYPE!r}, or has no "
            "model.safetensors: `txl convert` reads an old checkpoint that you have downloaded"
        )
    return folder
