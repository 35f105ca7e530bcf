"""The models that come with the package: a folder of data for each version.

::

    pretrained/NAME-VERSION/
        config.json  model.safetensors  vocab.json  tokenizer.json    a model folder
        recipe.toml    the recipe of its training; [generate] is how it generates
        model.toml     its card for programs: :attr:`ShippedModel.card`
        README.md      its card for readers
        SHA256SUMS     checksums of all other files, in the format of sha256sum
"""

import math
import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformer_xl.config import files
from transformer_xl.config.checks import near
from transformer_xl.config.files import checksum
from transformer_xl.errors import CheckpointError, InputError

CARD_FILE = "model.toml"
TEXT_FILE = "README.md"
SUMS_FILE = "SHA256SUMS"


@dataclass(frozen=True)
class ShippedModel:
    """One version of a model that comes with the package."""

    name: str
    version: int
    folder: Path

    @property
    def full_name(self) -> str:
        """The name with the version, as in ``python-code-2``."""
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
    def card(self) -> dict[str, Any]:
        """The card for programs: texts of a line ``summary``, ``data`` and ``licence``.

        ``metrics`` has its figures by name, the most important one first. A name says the unit, and
        of which text.

        Raises:
            OSError: The file cannot be read.
        """
        return tomllib.loads((self.folder / CARD_FILE).read_text(encoding="utf-8"))

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

    def about(self) -> dict[str, object]:
        """Return what ``txl models --json`` prints."""
        about = {"name": self.name, "version": self.version, "parameters": self.n_parameters}
        about |= {"bytes": self.n_bytes, "folder": str(self.folder)}
        return {**about, **self.card}

    def line(self) -> str:
        """Return what ``txl models`` prints."""
        figures = ", ".join(f"{value:g} {name}" for name, value in self.card["metrics"].items())
        return f"{self.card['summary']} ({self.n_parameters / 1e6:.1f} M parameters; {figures})"

    @classmethod
    def all(cls) -> "list[ShippedModel]":
        """Return all versions of all shipped models, by name, the newest version first.

        A folder without settings of a model or without its card is none.
        """
        models = []
        for folder in files.SHIPPED.iterdir() if files.SHIPPED.is_dir() else ():
            match = re.fullmatch(r"([a-z][a-z0-9-]*)-([1-9][0-9]*)", folder.name)
            if match and all((folder / name).is_file() for name in ("config.json", CARD_FILE)):
                models.append(cls(match[1], int(match[2]), folder))
        return sorted(models, key=lambda model: (model.name, -model.version))

    @classmethod
    def newest(cls) -> "list[ShippedModel]":
        """Return the newest version of each shipped model, by name."""
        return [*{model.name: model for model in reversed(cls.all())}.values()][::-1]

    @classmethod
    def find(cls, name: str) -> "ShippedModel | None":
        """Return the shipped model of a name, as ``python-code`` or ``python-code-2``, if any.

        A name without a version is that of the newest one.
        """
        return next((model for model in cls.all() if name in (model.name, model.full_name)), None)

    @classmethod
    def named(cls, name: str) -> "ShippedModel":
        """Return the shipped model of a name, as :meth:`find`.

        Raises:
            InputError: No shipped model has this name.
        """
        if (model := cls.find(name)) is None:
            raise InputError(f"no shipped model is called {name!r}; {hint(name)}")
        return model

    @staticmethod
    def verify(folder: Path) -> None:
        """Require that the files in a folder are those that its ``SHA256SUMS`` lists, if any.

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


def hint(name: str) -> str:
    """List the shipped models for an error about a name, and the most similar one."""
    names = [model.name for model in ShippedModel.newest()]
    nearest = near(name, [*names, *(model.full_name for model in ShippedModel.all())])
    question = f"; did you mean {nearest}?" if nearest else ""
    return f"shipped models: {', '.join(names)}{question}"


def shipped_path(name: str) -> Path:
    """Return the folder of a shipped model, for programs that take only folders.

    It belongs to the installed package: nothing may be written there.

    Args:
        name: The name of the model, as ``python-code``, or with a version, as ``python-code-2``.

    Raises:
        InputError: No shipped model has this name.

    Example:
        >>> shipped_path("shakespeare").name
        'shakespeare-2'
    """
    return ShippedModel.named(name).folder
