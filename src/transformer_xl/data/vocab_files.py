"""Vocabularies as they are read: ours, and tokenizers of other programs."""

import hashlib
import json
from pathlib import Path
from typing import get_args

from transformer_xl.config import FORMAT_VERSION
from transformer_xl.data.brought import BroughtVocab, from_sentencepiece
from transformer_xl.data.imported import ImportedVocab
from transformer_xl.data.vocab import VOCAB_FILE, Vocab, VocabKind

_LARGEST = 256 << 20


def load_vocab(folder: Path | str) -> Vocab:
    """Read the vocabulary of a corpus or model folder, or of the models of a run folder.

    Raises:
        FileNotFoundError: The folder holds no vocabulary.
        RuntimeError: The files are damaged or from a newer version.
    """
    folder = Path(folder)
    within = (folder, folder / "model" / "best", folder / "model" / "last")
    folder = next((x for x in within if (x / VOCAB_FILE).is_file()), folder)
    for name in (VOCAB_FILE, "tokenizer.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} holds no vocabulary: {name} is missing; give a folder that has one, or "
                f"for a converted model write it again with `txl convert {folder} NEW --vocab FILE`"
            )
    path = folder / VOCAB_FILE
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        version, kind, expected = about["format_version"], about["kind"], about["hash"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RuntimeError(f"{path} is damaged ({error!r}); restore it from a copy") from error
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise RuntimeError(
            f"{path} has format {version!r}, this version reads up to {FORMAT_VERSION}: "
            "update transformer_xl"
        )
    if kind not in get_args(VocabKind):
        raise RuntimeError(f"{path} names the kind {kind!r}, not one of {get_args(VocabKind)}")
    path = folder / "tokenizer.json"
    definition = path.read_bytes()
    if kind == "imported":
        return ImportedVocab.load(folder, definition, about)
    if hashlib.sha256(f"{kind}\n".encode() + definition).hexdigest() != expected:
        raise RuntimeError(
            f"{path} is damaged or was edited: it does not match the hash in vocab.json; "
            "restore it from a copy"
        )
    try:
        if kind == "brought":
            return BroughtVocab(definition.decode())
        return Vocab(kind, definition.decode())
    except Exception as error:  # tokenizers has no class of its own.
        raise RuntimeError(f"{path} is damaged ({error}); restore it from a copy") from error


def is_vocabulary(path: Path) -> bool:
    """Return whether a folder has a vocabulary of ours, be it damaged: a model folder may."""
    try:
        about = json.loads((path / VOCAB_FILE).read_text(encoding="utf-8"))
    except OSError:
        return False
    except (ValueError, RecursionError):
        return True
    # The file of this name beside another program's tokenizer maps its symbols to numbers.
    return isinstance(about, dict) and isinstance(about.get("kind"), str)


def divided_as(tokenizer: str) -> VocabKind:
    """Return by which rules a text may be cut in parts for the tokenizer of ``data.tokenizer``."""
    if not is_vocabulary(Path(tokenizer)):
        return "brought"
    vocab = load_vocab(tokenizer)
    if not isinstance(vocab, ImportedVocab):
        return vocab.kind
    # Words of old end with their line; a text of characters may be one long line.
    kinds: dict[str, VocabKind] = {"bytes": "bytes", "chars": "imported"}
    return kinds.get(vocab.rules.join, "words")


def bring(path: Path) -> Vocab:
    """Read the tokenizer of ``data.tokenizer``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no tokenizer.
        RuntimeError: It is the vocabulary of a model folder, and damaged.
    """
    if is_vocabulary(path):
        return load_vocab(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"data.tokenizer={str(path)!r}: there is no such file")
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"data.tokenizer={str(path)!r} is no tokenizer: it is too large")
    data = path.read_bytes()
    try:
        definition = data.decode() if data.lstrip()[:1] == b"{" else from_sentencepiece(data)
        return BroughtVocab(definition)
    except Exception as error:  # tokenizers has no class of its own.
        raise ValueError(
            f"data.tokenizer={str(path)!r} is no tokenizer.json and no SentencePiece model that "
            f"can be used: {error}"
        ) from error
