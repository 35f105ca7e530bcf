"""The models that come with the package: a folder of data for each version.

::

    pretrained/NAME-VERSION/
        config.json  model.safetensors  vocab.json  tokenizer.json    a model folder
        recipe.toml    the recipe of its training; [generate] is how it generates
        model.toml     its card for programs: a :class:`Card`
        README.md      its card for readers
        SHA256SUMS     checksums of all other files, in the format of sha256sum
"""

import dataclasses
import math
import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformer_xl.config import files
from transformer_xl.config.checks import check, near, no_type_check, read_settings
from transformer_xl.config.files import checksum
from transformer_xl.errors import CheckpointError, InputError

CARD_FILE = "model.toml"
TEXT_FILE = "README.md"
SUMS_FILE = "SHA256SUMS"


@no_type_check
@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What programs need to know of a shipped model: the contents of ``model.toml``."""

    summary: str = ""
    """What it generates, in a line."""
    data: str = ""
    """What it was trained on, in a line."""
    licence: str = ""
    """The licences of the weights and of the data, in a line."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """Its figures, the most important one first. A name says the unit, and of which text."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class ShippedModel:
    """One version of a model that comes with the package."""

    name: str
    version: int
    folder: Path

    @property
    def full_name(self) -> str:
        """The name with the version, as in ``python-code-1``."""
        return f"{self.name}-{self.version}"

    @property
    def using(self) -> str:
        """What a command says that uses it."""
        return f"using the shipped model {self.name} (version {self.version})"

    @property
    def n_bytes(self) -> int:
        """Size of all files."""
        return sum(file.stat().st_size for file in self.folder.iterdir())

    @cached_property
    def card(self) -> Card:
        """The card for programs.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is not valid.
        """
        path = self.folder / CARD_FILE
        return read_settings(Card, tomllib.loads(path.read_text(encoding="utf-8")), str(path))

    @cached_property
    def n_parameters(self) -> int:
        """Number of parameters, tied ones once.

        Raises:
            OSError: The weights cannot be read.
            CheckpointError: They are damaged.
        """
        from safetensors import SafetensorError, safe_open

        path = self.folder / "model.safetensors"
        try:
            with safe_open(path, "numpy") as file:
                shapes = (file.get_slice(name).get_shape() for name in file.keys())  # noqa: SIM118
                return sum(map(math.prod, shapes))
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    def about(self) -> dict[str, Any]:
        """Return what ``txl models --json`` prints."""
        about = {"name": self.name, "version": self.version, "parameters": self.n_parameters}
        about |= {"bytes": self.n_bytes, "folder": str(self.folder)}
        return about | dataclasses.asdict(self.card)


def shipped_models() -> list[ShippedModel]:
    """Return all versions of all shipped models, by name, the newest version first.

    A folder without settings of a model or without its card is none.
    """
    models = []
    for folder in files.SHIPPED.iterdir() if files.SHIPPED.is_dir() else ():
        match = re.fullmatch(r"([a-z][a-z0-9-]*)-([1-9][0-9]*)", folder.name)
        if match and all((folder / name).is_file() for name in ("config.json", CARD_FILE)):
            models.append(ShippedModel(match[1], int(match[2]), folder))
    return sorted(models, key=lambda model: (model.name, -model.version))


def newest_models() -> list[ShippedModel]:
    """Return the newest version of each shipped model, by name."""
    return [*{model.name: model for model in reversed(shipped_models())}.values()][::-1]


def shipped_model(name: str) -> ShippedModel | None:
    """Return the shipped model of a name, as ``python-code`` or ``python-code-1``, if any.

    A name without a version is that of the newest one.
    """
    named = (model for model in shipped_models() if name in (model.name, model.full_name))
    return next(named, None)


def hint(name: str) -> str:
    """List the shipped models for an error about a name, and the most similar one."""
    names = [model.name for model in newest_models()]
    nearest = near(name, [*names, *(model.full_name for model in shipped_models())])
    question = f"; did you mean {nearest}?" if nearest else ""
    return f"shipped models: {', '.join(names)}{question}"


def shipped_path(name: str) -> Path:
    """Return the folder of a shipped model, for programs that take only folders.

    It belongs to the installed package: nothing may be written there.

    Args:
        name: The name of the model, as ``python-code``, or with a version, as ``python-code-1``.

    Raises:
        InputError: No shipped model has this name.

    Example:
        >>> shipped_path("shakespeare").name
        'shakespeare-1'
    """
    if (model := shipped_model(name)) is None:
        raise InputError(f"no shipped model is called {name!r}; {hint(name)}")
    return model.folder


def check_sums(folder: Path) -> None:
    """Require that the files in a folder are those that its ``SHA256SUMS`` lists, if it has one.

    Raises:
        OSError: A file cannot be read.
        CheckpointError: A file is missing, has changed, or is not listed.
    """
    path = folder / SUMS_FILE
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    sums = {file.name: checksum(file) for file in folder.iterdir() if file != path}
    problems = [
        f"{name} {'has changed' if name in listed else 'is not listed'}"
        for name, digest in sorted(sums.items())
        if listed.get(name) != digest
    ]
    problems += [f"{name} is missing" for name in sorted(listed.keys() - sums)]
    if problems:
        raise CheckpointError(
            f"{path} does not match the files beside it: {', '.join(problems)}; "
            "install transformer-xl again"
        )
