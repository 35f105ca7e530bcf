"""Names of models: a folder, a shipped model, or ``OWNER/NAME`` of the Hugging Face hub.

Whatever takes a model takes such a name, and :func:`locate` is the only place that resolves it, in
this order. The hub is asked only for a name that has the form of one, and whose first part is no
local folder, so that the path of a run that is missing stays a path.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from transformer_xl.config import MODEL_TYPE
from transformer_xl.config.shipped import hint, shipped_model

# What a model folder or a run folder has at least one of.
_MARKS = ("config.json", "vocab.json", "recipe.toml", "model", "checkpoints")
# As the hub has them: neither part has two hyphens or two dots side by side, or ends with one.
_HUB_NAME = re.compile(
    r"(?!.*(?:--|\.\.|[.-]/|[.-]$))[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII
)
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
        RuntimeError: The model on the hub is none of this package, or huggingface_hub is missing.
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
    """Resolve the name of a model without the hub; None if there is neither path nor model."""
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
    return bool(_HUB_NAME.fullmatch(text)) and not Path(name).parent.exists()


def _remedy(name: str) -> str:
    return (
        "give a model folder, a run folder, a shipped model, or OWNER/NAME of the Hugging Face hub "
        f"({hint(name)})"
    )


@cache
def _download(name: str) -> Path:
    """Return the folder in the hub's cache with the files of a model that are needed."""
    try:
        from huggingface_hub import errors, hf_hub_download, snapshot_download
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"{name} is no folder; to download it from the Hugging Face hub, "
            "pip install 'transformer-xl[hf]'"
        ) from error
    try:
        # First, as weights of other models may be large.
        _require_ours(Path(hf_hub_download(name, "config.json")), name)
        folder = Path(snapshot_download(name, allow_patterns=[*_HUB_FILES]))
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise OSError(
            f"{name} is no folder, and neither in the cache of the Hugging Face hub nor can the "
            f"hub be reached: connect to the network, or {_remedy(name)}"
        ) from error
    except errors.EntryNotFoundError as error:
        raise RuntimeError(
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
    except Exception as error:  # Those of its network libraries have no common class.
        raise OSError(
            f"cannot download {name} from the Hugging Face hub: {type(error).__name__}: {error}"
        ) from error
    if not any(folder.glob("model*.safetensors")):
        raise RuntimeError(
            f"{name} on the Hugging Face hub has no model.safetensors; other files, such as "
            "pickles (pytorch_model.bin), are not downloaded: download an old checkpoint yourself "
            "and convert it with `txl convert`"
        )
    return folder


def _require_ours(path: Path, name: str) -> None:
    """Require that a settings file is that of a model of this package.

    Raises:
        RuntimeError: It is not.
    """
    try:
        kind = json.loads(path.read_text(encoding="utf-8"))["model_type"]
    except (ValueError, KeyError, TypeError, RecursionError):
        kind = None
    if kind != MODEL_TYPE:
        raise RuntimeError(
            f"{name} on the Hugging Face hub is a model of type {kind!r}, not {MODEL_TYPE!r}: only "
            "models of this package can be loaded; `txl convert` reads old checkpoints of "
            "Transformer-XL (transfo-xl) that you have downloaded"
        )
