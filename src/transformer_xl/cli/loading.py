"""Loading models and reading texts, for several commands."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.cli.given import Weights
from transformer_xl.cli.printing import say
from transformer_xl.config import (
    Config,
    DataConfig,
    EvalConfig,
    locate,
    recipe_of,
    require_new_file,
)
from transformer_xl.errors import DataError, InputError

_EMPTY = "is empty (0 tokens): at least 2 tokens are needed to predict one"

if TYPE_CHECKING:
    from transformer_xl.data import Corpus, Vocab
    from transformer_xl.inference.generate import State
    from transformer_xl.model import LanguageModel


def require_model(name: Path | str) -> None:
    """Require that a model exists, before anything is loaded; print which one a name means.

    Raises:
        FileNotFoundError: There is no such model.
        InputError: The name cannot be that of a model.
    """
    if remark := locate(name).remark:
        say(remark)


def evaluation_of(folder: Path | str, recipe: Config | None) -> EvalConfig:
    """Return the evaluation settings of the recipe of a model, else those of its settings file."""
    if recipe is not None:
        return recipe.eval
    from transformer_xl.model import ModelFolder

    return ModelFolder.find(folder).read_eval_config() or EvalConfig()


def say_if_unmeasured(folder: Path | str, model: "LanguageModel", mem_len: int) -> None:
    """Say so where a memory is longer than the longest that a model's settings measure."""
    settings = evaluation_of(folder, recipe_of(folder))
    longest = max(model.config.mem_len, settings.mem_len or 0, *settings.mem_lens, 0)
    # No layer sees more.
    most_seen = max(model.config.layer_attn_lens, default=model.config.attn_len or mem_len)
    if min(mem_len, most_seen) > longest:
        say(
            f"memory {mem_len:,}: the evaluation settings of {folder} have memories of up to "
            f"{longest:,}; a longer one may predict worse. To compare: txl eval with "
            f"--eval.mem_lens {longest} {mem_len}"
        )


def load(folder: Path | str, weights: Weights = "float32") -> tuple["LanguageModel", "Vocab"]:
    """Load the model of a folder, or the best one of a run, with its vocabulary."""
    from transformer_xl.config import pick_device, prepare_process
    from transformer_xl.inference.generate import from_pretrained

    prepare_process()
    return from_pretrained(folder, pick_device(), weights)


def load_with_state(
    folder: Path | str, weights: Weights, path: Path | None
) -> tuple["LanguageModel", "Vocab", "State | None", str]:
    """Load a model, and the state of a text from a file if it exists.

    Args:
        folder: Folder or name of the model.
        weights: Precision of the weights.
        path: The file of the state, to which the caller writes at the end. None: there is no state.

    Returns:
        The model, its vocabulary, the state or None, and the checksum of the weights, which is
        empty without ``path``.

    Raises:
        OSError: The state could not be written at the end: ``path`` is a folder, a link or a
            device, or its folder cannot be written to.
        CheckpointError: A file is damaged.
        ValueError: The state belongs to another model.
    """
    if path:
        require_new_file(path, force=True)
    from transformer_xl.inference.generate import State
    from transformer_xl.model import ModelFolder

    # Computed first: a running training may replace the weights later.
    checksum = ModelFolder.find(folder).weights.checksum if path else ""
    model, vocab = load(folder, weights)
    state = State.load(path, checksum, model) if path and path.exists() else None
    return model, vocab, state, checksum


@contextmanager
def save_at_end(save: Callable[[], None]) -> Iterator[None]:
    """Call ``save`` at the end of a ``with`` block, also when Ctrl-C or SIGTERM ends it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        try:
            save()
        finally:
            signal.signal(signal.SIGTERM, before)


def corpus_of(data: DataConfig, vocab: "Vocab", folder: Path | str, remedy: str) -> "Corpus":
    """Prepare the corpus of a run; require that its vocabulary is that of the model.

    Raises:
        InputError: The settings name no corpus.
        DataError: The vocabulary is another one.
    """
    from transformer_xl.data import prepare

    if not data.is_given:
        why = "is a model folder without a recipe, so its corpus is unknown"
        raise InputError(f"{folder} {why}: give {remedy}, or the run folder instead")
    corpus = prepare(data, say)
    if corpus.vocab.hash != vocab.hash:
        raise DataError(
            f"the vocabulary of the corpus is not the one of the model in {folder}: give {remedy}"
        )
    return corpus


def name_of(path: Path) -> str:
    """Name a file in messages; - is the standard input."""
    return "the standard input" if str(path) == "-" else str(path)


@contextmanager
def name_in_errors(path: Path, part: str = "") -> Iterator[None]:
    """Raise an OSError of a ``with`` block as one that says which file cannot be read.

    Args:
        path: The file.
        part: The part that is read, as it follows the name.
    """
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot read {name_of(path)}{part}: {error.strerror}") from error


def require_readable(path: Path, *, is_text: bool = True) -> None:
    """Require, before anything is loaded, that a file can be read and, if a text, is not empty.

    Raises:
        OSError: The file cannot be read.
        DataError: The text is empty.
    """
    # A named pipe can be opened only once.
    if str(path) == "-" or (path.exists() and not (path.is_file() or path.is_dir())):
        return
    with name_in_errors(path), path.open("rb") as file:
        if is_text and not file.read(1):
            raise DataError(f"{path} {_EMPTY}")


def is_within(file: Path, paths: str | None) -> bool:
    """Whether a file is one of ``data.path``, or in a folder of it."""
    if str(file) == "-":
        return False
    places = {Path(place).resolve() for place in (paths or "").split(os.pathsep) if place}
    return not places.isdisjoint([file.resolve(), *file.resolve().parents])


def read_bytes(path: Path) -> bytes:
    """Return the contents of a file; - is the standard input.

    Raises:
        OSError: The file cannot be read.
    """
    with name_in_errors(path):
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()


def read_text(path: Path, vocab: "Vocab", *, is_raw: bool = False, remedy: str = "") -> str:
    """Return the text of a file; print what normalization changed in it.

    Args:
        path: The file, which may be compressed; - is the standard input.
        vocab: The vocabulary that is to encode the text.
        is_raw: Whether to read every byte as it is: without decompression and normalization.
        remedy: Says which option of the command reads the file as it is.

    Returns:
        The text; if the vocabulary is of bytes, those that are not UTF-8 are surrogates.

    Raises:
        OSError: The file cannot be read.
        DataError: The text is empty, or is not UTF-8 and the vocabulary is not of bytes.
    """
    from transformer_xl.data import Normalizer, opened

    name = name_of(path)
    if is_raw or str(path) == "-":
        content = read_bytes(path)
    else:
        with name_in_errors(path), opened(path) as file:
            content = file.read()
    if not is_raw:
        normalizer = Normalizer(name, remedy)
        content = b"".join(normalizer.blocks([content]))
        say_changes(name, normalizer.changes, remedy)
    if not content:
        raise DataError(f"{name} {_EMPTY}")
    text = content.decode("utf-8", "surrogateescape")
    _require_decodable(text, vocab, name)
    return text


def say_changes(name: str, changes: Counter[str], remedy: str = "") -> None:
    """Print in a line what normalization changed in a text, if it changed anything."""
    from transformer_xl.data import Normalizer

    if described := Normalizer.describe(changes):
        say(f"normalized the text of {name}: {described}{remedy and '; '}{remedy}")


def tokenize(name: str, text: str, vocab: "Vocab", encode: Callable[[str], list[int]]) -> list[int]:
    """Return the tokens of a text; print a warning about symbols that are read as ``<unk>``.

    Args:
        name: Name of the text in the warning and in errors.
        text: The text.
        vocab: The vocabulary.
        encode: The method of the vocabulary that encodes the text.

    Raises:
        DataError: The text has symbols that the vocabulary cannot encode.
    """
    try:
        ids = encode(text)
    except ValueError as error:
        raise DataError(f"{name}: {error}") from error
    if warning := vocab.unknown_warning(text, ids):
        say(f"warning: {name}: {warning}")
    return ids


def tokenize_prompt(prompt: str, vocab: "Vocab", *, is_raw: bool = False) -> list[int]:
    """Return the tokens of a prompt; print what was changed and what is read as ``<unk>``.

    Args:
        prompt: The prompt, as typed.
        vocab: The vocabulary.
        is_raw: Whether the model reads raw text, so that the prompt is not normalized.

    Raises:
        DataError: The prompt has bytes or symbols that the vocabulary cannot encode.
    """
    if not is_raw:
        prompt, changes = vocab.normalized(prompt)
        say_changes("the prompt", changes)
    _require_decodable(prompt, vocab, "the prompt")
    return tokenize("the prompt", prompt, vocab, vocab.encode)


def start_of(vocab: "Vocab") -> list[int]:
    """Return the tokens of an empty prompt."""
    return [] if vocab.start_id is None else [vocab.start_id]


def _require_decodable(text: str, vocab: "Vocab", name: str) -> None:
    """Require that a text has no bytes that are not UTF-8, unless the vocabulary is of bytes.

    Args:
        text: The text, in which such bytes are surrogates.
        vocab: The vocabulary that is to encode it.
        name: Name of the text in errors.

    Raises:
        DataError: There is such a byte.
    """
    escaped = next((x for x in text if "\udc80" <= x <= "\udcff"), None)
    if escaped is not None and vocab.kind != "bytes":
        raise DataError(
            f"{name} is not UTF-8 text: character {text.index(escaped):,} is the byte "
            f"0x{ord(escaped) - 0xDC00:02x}, and the vocabulary has only {vocab.kind}: convert the "
            "text to UTF-8, or use a model of bytes"
        )
