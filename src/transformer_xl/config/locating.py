"""Names of models: a folder, or a shipped model.

Whatever takes a model takes such a name, and :func:`locate` is the only place that resolves it.
"""

from os import PathLike
from pathlib import Path
from typing import NamedTuple

from transformer_xl.config.shipped import ShippedModel, hint
from transformer_xl.errors import InputError

# What a model folder or a run folder has at least one of.
_MARKS = ("config.json", "vocab.json", "recipe.toml", "model", "checkpoints")
_REMEDY = (
    "give a model folder, a run folder or a shipped model; hf download OWNER/NAME --local-dir "
    "FOLDER gets one from the Hugging Face hub"
)


class Located(NamedTuple):
    """Where a model is."""

    path: Path
    """A folder; or a file, if the name is the path of one."""
    remark: str = ""
    """Which model the name means, where the name is not simply a path."""
    is_path: bool = True
    """Whether the name is a path of the caller, whose contents may change."""


def locate(name: Path | str) -> Located:
    """Resolve the name of a model: a path, or a shipped model.

    Raises:
        FileNotFoundError: There is no such model.
        InputError: The name is empty, or no name at all.
    """
    if (place := locate_here(name)) is None:
        raise FileNotFoundError(f"{name} does not exist: {_REMEDY} ({hint(Path(name).as_posix())})")
    return place


def locate_here(name: Path | str) -> Located | None:
    """Resolve the name of a model, as :func:`locate`; None if there is no such model.

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
