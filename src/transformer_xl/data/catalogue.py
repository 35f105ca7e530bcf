"""The corpora that ``data.name`` may name, as ``catalogue.toml`` lists them."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from transformer_xl.config import DataConfig


@dataclass(frozen=True, slots=True)
class Source:
    """An address of a file, or of an archive that holds it."""

    url: str
    member: str = ""
    """Where the file lies in the archive at ``url``; empty: ``url`` is the file."""
    checksum: str = ""
    """Of the archive, as in `RemoteFile`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """A published file, or files when ``name`` is a pattern such as ``shard-*``."""

    name: str
    sources: tuple[Source, ...]
    checksum: str = ""
    """``sha256:...`` or ``md5:...``; empty: not known."""
    also: tuple[str, ...] = ()
    """Other common names and patterns of local copies, in order of preference."""
    n_bytes: int | None = None
    """Size of the whole file, if parts of it are in common use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownCorpus:
    """A corpus that ``data.name`` may name."""

    summary: str
    files: Mapping[str, RemoteFile] = field(default_factory=dict)
    """By part: ``train`` (split as the settings say unless the others are there), ``valid``,
    ``test``. Empty for a corpus that every machine has."""
    counted: str = "train"
    """Text from which the authors built the vocabulary: the training text, or all."""
    settings: DataConfig = field(default_factory=DataConfig)
    """Its usual settings, but for the name."""


_LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KNOWN_CORPORA = msgspec.convert(_LISTED, dict[str, KnownCorpus])
"""The corpora that ``data.name`` may name."""
