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
from transformer_xl.config.checks import check, near, no_type_check, read_settings, require
from transformer_xl.config.files import checksum, replace_file
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
        for name in ("summary", "data", "licence", "metrics"):
            value = getattr(self, name)
            require(bool(value), f"{name} is missing or empty")
            require(not isinstance(value, str) or "\n" not in value, f"{name} must be one line")
        for name, value in self.metrics.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            require(is_number, f"metrics.{name}={value!r} must be a number")


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

    @property
    def text(self) -> str:
        """The card for readers, in Markdown."""
        return (self.folder / TEXT_FILE).read_text(encoding="utf-8")

    @cached_property
    def card(self) -> Card:
        """The card for programs.

        Raises:
            OSError: The file cannot be read.
            InputError: It is not valid.
        """
        path = self.folder / CARD_FILE
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{path} is not valid TOML: {error}") from error
        return read_settings(Card, values, str(path))

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
        sizes = {"parameters": self.n_parameters, "bytes": self.n_bytes}
        own = {"name": self.name, "version": self.version, **sizes, "folder": str(self.folder)}
        return own | dataclasses.asdict(self.card)


def shipped_models() -> list[ShippedModel]:
    """Return all versions of all shipped models, by name, the newest version first.

    A folder without settings of a model or without its card is none.
    """
    found = []
    for folder in files.SHIPPED.iterdir() if files.SHIPPED.is_dir() else ():
        match = re.fullmatch(r"([a-z][a-z0-9-]*)-([1-9][0-9]*)", folder.name)
        if match and all((folder / name).is_file() for name in ("config.json", CARD_FILE)):
            found.append(ShippedModel(match[1], int(match[2]), folder))
    return sorted(found, key=lambda model: (model.name, -model.version))


def newest_models() -> list[ShippedModel]:
    """Return the newest version of each shipped model, by name."""
    newest: dict[str, ShippedModel] = {}
    for model in shipped_models():
        newest.setdefault(model.name, model)
    return list(newest.values())


def shipped_model(name: str) -> ShippedModel | None:
    """Return the shipped model of a name, as ``python-code`` or ``python-code-1``, if any.

    A name without a version is that of the newest one.
    """
    named = (model for model in shipped_models() if name in (model.name, model.full_name))
    return next(named, None)


def require_shipped(name: str) -> ShippedModel:
    """Return the shipped model of a name.

    Raises:
        InputError: There is none.
    """
    if (found := shipped_model(name)) is None:
        raise InputError(f"no shipped model is called {name!r}; {hint(name)}")
    return found


def hint(name: str) -> str:
    """List the shipped models for an error about a name, and the most similar one."""
    names = [model.name for model in newest_models()]
    if not names:
        return "this installation has no shipped models"
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
    return require_shipped(name).folder


def write_sums(folder: Path) -> None:
    """Write the checksums of all files in a folder to ``SHA256SUMS``, atomically."""
    lines = (f"{checksum(folder / name)}  {name}\n" for name in sorted(_names(folder)))
    replace_file(folder / SUMS_FILE, "".join(lines).encode())


def check_sums(folder: Path) -> None:
    """Require that the files in a folder are those that its ``SHA256SUMS`` lists.

    Raises:
        OSError: A file cannot be read.
        CheckpointError: A file is missing, has changed, or is not listed.
    """
    path = folder / SUMS_FILE
    lines = path.read_text(encoding="utf-8").splitlines()
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    names = _names(folder)
    problems = [f"{name} is missing" for name in sorted(listed.keys() - names)]
    problems += [f"{name} is not listed" for name in sorted(names - listed.keys())]
    problems += [
        f"{name} has changed"
        for name in sorted(names & listed.keys())
        if checksum(folder / name) != listed[name]
    ]
    if problems:
        raise CheckpointError(
            f"{path} does not match the files beside it: {', '.join(problems)}; "
            "install transformer-xl again"
        )


def _names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} - {SUMS_FILE}
