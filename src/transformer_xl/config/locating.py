"""Names of models: a folder, a shipped model, or ``OWNER/NAME`` of the Hugging Face hub.

Whatever takes a model takes such a name, and :func:`locate` is the only place that resolves it, in
this order. The hub is asked only for a name that has the form of one, and whose first part is no
local folder or one that runs and models are usually in, so that the path of a run that is missing
stays a path. It is asked once: without a network the error comes at once.
"""

import json
import re
from contextlib import suppress
from functools import cache
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from transformer_xl.config.checks import near
from transformer_xl.config.config import MODEL_TYPE
from transformer_xl.config.shipped import hint, shipped_model
from transformer_xl.errors import CheckpointError, InputError

# What a model folder or a run folder has at least one of.
_MARKS = ("config.json", "vocab.json", "recipe.toml", "model", "checkpoints")
# As the hub has them: neither part has two hyphens or two dots side by side, or ends with one.
_HUB_NAME = re.compile(
    r"(?!.*(?:--|\.\.|[.-]/|[.-]$))[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII
)
# Folders in the examples of this package. Of the hub they are no owners.
_LOCAL = ("runs", "models")
_SECONDS = 5.0
"""How long the hub may take to answer whether it has a model."""
# No pickles, and no code.
_HUB_FILES = (
    *("config.json", "model.safetensors", "model.safetensors.index.json"),
    *("model-*-of-*.safetensors", "vocab.json", "tokenizer.json", "recipe.toml", "README.md"),
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
    """Resolve the name of a model: a path, a shipped model, or ``OWNER/NAME`` of the hub.

    Raises:
        FileNotFoundError: There is no such model.
        OSError: The hub cannot be reached, or refuses.
        InputError: The name is empty, or no name at all.
        CheckpointError: The model on the hub is none of this package, or huggingface_hub is
            missing.
    """
    if (found := locate_here(name)) is not None:
        return found
    text = Path(name).as_posix()
    if may_be_on_hub(name):
        folder = _download(text)
        remark = f"using {text} from the Hugging Face hub (revision {folder.name[:12]})"
        return Located(folder, remark, is_path=False)
    raise FileNotFoundError(f"{name} does not exist: {_remedy(text)}")


def locate_here(name: Path | str) -> Located | None:
    """Resolve the name of a model without the hub; None if there is neither path nor model.

    Raises:
        InputError: The name is empty, as a variable that is not set, or no name at all.
    """
    if not isinstance(name, str | PathLike) or not str(name):
        raise InputError(
            f"{name!r} is no name of a model: give a model folder, a run folder, a shipped model, "
            "or OWNER/NAME of the Hugging Face hub; . is the folder that you are in"
        )
    path = Path(name)
    # The text itself: ./python-code is a path.
    model = shipped_model(str(name))
    if path.exists() and (model is None or any((path / mark).exists() for mark in _MARKS)):
        remark = ""
        if model is not None:
            remark = f"using the folder {name}, not the shipped model {model.full_name}"
        return Located(path, remark)
    if model is None:
        return None
    return Located(model.folder, model.using, is_path=False)


def may_be_on_hub(name: Path | str) -> bool:
    """Whether a name is to be looked up on the hub if there is no such path."""
    # The text as it was given: ./OWNER/NAME is a path.
    text = name if isinstance(name, str) else name.as_posix()
    owner = Path(name).parent
    return bool(_HUB_NAME.fullmatch(text)) and owner.name not in _LOCAL and not owner.exists()


def _remedy(name: str) -> str:
    nearest = _nearest_folder(Path(name))
    folder = f"; did you mean the folder {nearest}?" if nearest else ""
    return (
        "give a model folder, a run folder, a shipped model, or OWNER/NAME of the Hugging Face hub "
        f"({hint(name)}{folder})"
    )


def _nearest_folder(path: Path) -> Path | None:
    """Return the folder whose path is most similar, part by part, if any is similar enough."""
    parent = path.parent
    if not parent.is_dir():
        parent = None if parent == path else _nearest_folder(parent)
    if parent is None:
        return None
    with suppress(OSError):
        names = [x.name for x in parent.iterdir() if x.is_dir()]
        found = path.name if path.name in names else near(path.name, names)
        return None if found is None else parent / found
    return None


@cache
def _download(name: str) -> Path:
    """Return the folder in the hub's cache with the files of a model that are needed."""
    try:
        from huggingface_hub import errors, hf_hub_download, snapshot_download
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{name} is no folder; to download it from the Hugging Face hub, "
            "pip install 'transformer-xl[hf]'"
        ) from error
    # What follows would try for half a minute whether a network is there.
    failed = ask_hub(name, "config.json")
    is_cached = failed is not None
    try:
        try:
            # First, as weights of other models may be large.
            config = hf_hub_download(name, "config.json", local_files_only=is_cached)
            _require_ours(Path(config), name)
            patterns = [*_HUB_FILES]
            folder = snapshot_download(name, allow_patterns=patterns, local_files_only=is_cached)
        except errors.LocalEntryNotFoundError:
            if isinstance(failed, errors.EntryNotFoundError | errors.RepositoryNotFoundError):
                raise failed from None
            raise
    except errors.LocalEntryNotFoundError as error:
        why = f" ({type(failed).__name__})" if failed else ""
        raise OSError(
            f"{name} is no folder, and neither in the cache of the Hugging Face hub nor can the "
            f"hub be reached{why}: connect to the network, or {_remedy(name)}"
        ) from failed or error
    except errors.EntryNotFoundError as error:
        raise CheckpointError(
            f"{name} on the Hugging Face hub is no model: it has no config.json"
        ) from error
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{name} on the Hugging Face hub can be read only by those whom its owner admits: ask "
            "for access there, and log in (hf auth login)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{name} does not exist, neither as a folder nor on the Hugging Face hub (or it is "
            f"private: hf auth login): {_remedy(name)}"
        ) from error
    except RuntimeError:
        raise
    except Exception as error:
        raise OSError(
            f"cannot download {name} from the Hugging Face hub: {type(error).__name__}: {error}"
        ) from error
    folder = Path(folder)
    if not any(folder.glob("model*.safetensors")):
        raise CheckpointError(
            f"{name} on the Hugging Face hub has no model.safetensors; other files, such as "
            "pickles (pytorch_model.bin), are not downloaded: download an old checkpoint yourself "
            "and convert it with `txl convert`"
        )
    return folder


def ask_hub(name: str, file: str, repo_type: str | None = None) -> Exception | None:
    """Ask the Hugging Face hub once for a file; return the error, if there is one."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=repo_type), timeout=_SECONDS)
    except Exception as error:  # noqa: BLE001  (those of its network libraries have no common class)
        return error
    return None


def _require_ours(path: Path, name: str) -> None:
    """Require that a settings file is that of a model of this package.

    Raises:
        CheckpointError: It is not.
    """
    try:
        kind = json.loads(path.read_text(encoding="utf-8"))["model_type"]
    except (ValueError, KeyError, TypeError, RecursionError):
        kind = None
    if kind != MODEL_TYPE:
        raise CheckpointError(
            f"{name} on the Hugging Face hub is a model of type {kind!r}, not {MODEL_TYPE!r}: only "
            "models of this package can be loaded; `txl convert` reads old checkpoints of "
            "Transformer-XL (transfo-xl) that you have downloaded"
        )
