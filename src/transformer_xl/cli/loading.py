"""Loading models and reading texts, for several commands."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from transformer_xl.cli.printing import say
from transformer_xl.config import Config, DataConfig, EvalConfig, GenerateConfig
from transformer_xl.config.recipes import recipe_of

if TYPE_CHECKING:
    import torch

    from transformer_xl.data import Vocab
    from transformer_xl.model import LanguageModel

_KNOWN = {"imported": "its own tokens"}
# Defined here, so that help does not import torch.
Weights = Literal["float32", "bfloat16", "int8"]


def fine_tuning_of(folder: Path) -> Config:
    """Return a recipe that fine-tunes a model: its architecture, vocabulary and weights.

    Settings of training, evaluation and generation come from the recipe of its run, if any.

    Raises:
        FileNotFoundError: There is no model.
        RuntimeError: Its settings file is damaged.
        ValueError: A setting is wrong.
    """
    from transformer_xl.data import load_vocab
    from transformer_xl.data.vocab_files import is_vocabulary
    from transformer_xl.model.pretrained import CONFIG_FILE, find_model_folder, load_config

    found = find_model_folder(folder)
    recipe = recipe_of(folder)
    model = load_config(found / CONFIG_FILE)
    base = recipe or Config(model=model, data=DataConfig(), eval=evaluation_of(folder, None, None))
    texts = {"name": "", "path": None, "valid_path": None, "test_path": None, "corpus": None}
    data = replace(base.data, **texts)
    if is_vocabulary(found):
        data = replace(data, tokenizer=str(found))
        if recipe is None:
            base = replace(base, generate=GenerateConfig(prompt=_prompt_for(load_vocab(found))))
    return replace(base, model=model, data=data, train=replace(base.train, init_from=str(found)))


def _prompt_for(vocab: "Vocab") -> str:
    """Return a prompt that the vocabulary can encode; some have no line break."""
    for text in ("\n", "The", "the", *vocab.symbols):
        try:
            if vocab.encode(text):
                return text
        except ValueError:
            continue
    return "\n"


def evaluation_of(folder: Path, recipe: Config | None, preset: str | None) -> EvalConfig:
    """Return evaluation settings: of the preset, else the recipe, else the settings file.

    Raises:
        ValueError: The preset is unknown, or the settings file is invalid.
    """
    if not preset and recipe:
        return recipe.eval
    if not preset and not folder.exists():
        # Reported before the command runs.
        return EvalConfig()
    from transformer_xl.config.presets import preset_eval
    from transformer_xl.model.pretrained import (
        CONFIG_FILE,
        find_model_folder,
        load_eval_config,
        read_config,
    )

    try:
        config = find_model_folder(folder) / CONFIG_FILE
    except FileNotFoundError:
        # Reported when the model is loaded.
        config = None
    if not preset:
        return (config and load_eval_config(config)) or EvalConfig()
    origin = read_config(config).get("origin") if config else None
    written_by = origin.get("format") if isinstance(origin, dict) else None
    return preset_eval(preset, keys_beyond_memory=int(written_by in ("tensorflow", "nvidia")))


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C in a ``with`` block, so that its ``finally`` clauses run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def load(folder: Path, device: "torch.device", weights: Weights) -> tuple["LanguageModel", "Vocab"]:
    """Load the model of a folder, or the best one of a run, with its vocabulary.

    Raises:
        FileNotFoundError: There is no model.
        RuntimeError: A file is damaged.
        ValueError: The settings are invalid, or model and vocabulary do not match.
    """
    from transformer_xl.config.device import keep_freed_memory
    from transformer_xl.inference.generate import open_folder

    keep_freed_memory()
    return open_folder(folder, device, weights)


def require_text(path: Path) -> None:
    """Check, before anything is loaded, that a file can be read and is not empty.

    Raises:
        OSError: It cannot be read.
        ValueError: It is empty.
    """
    # A named pipe can be opened only once.
    if str(path) == "-" or (path.exists() and not (path.is_file() or path.is_dir())):
        return
    try:
        with path.open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}") from error
    if is_empty:
        raise ValueError(f"{path} is empty (0 tokens): at least 2 tokens are needed to predict one")


def read_text(path: Path, vocab: "Vocab") -> str:
    """Read a text; - is the standard input.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not UTF-8, and the vocabulary is not one of bytes.
    """
    is_stdin = str(path) == "-"
    try:
        raw = sys.stdin.buffer.read() if is_stdin else path.read_bytes()
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}") from error
    name = "the standard input" if is_stdin else str(path)
    return _checked(raw.decode("utf-8", "surrogateescape"), vocab, name)


def encoded_text(path: Path, text: str, vocab: "Vocab", *, prepared: bool = False) -> list[int]:
    """Tokenize the text of a file, with a warning if parts are outside the vocabulary.

    Raises:
        ValueError: The vocabulary cannot encode it.
    """
    name = "the standard input" if str(path) == "-" else str(path)
    return _encoded(name, text, vocab, lambda text: vocab.encode_lines(text, prepared=prepared))


def encoded_prompt(prompt: str, vocab: "Vocab") -> list[int]:
    """Tokenize a prompt, with a warning if parts are outside the vocabulary."""
    return _encoded("the prompt", _checked(prompt, vocab, "the prompt"), vocab, vocab.encode)


def _encoded(name: str, text: str, vocab: "Vocab", encode: Callable[[str], list[int]]) -> list[int]:
    from transformer_xl.data.vocab import unknown_warning

    try:
        ids = encode(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if warning := unknown_warning(vocab, text, ids):
        say(f"warning: {name}: {warning}")
    return ids


def _checked(text: str, vocab: "Vocab", name: str) -> str:
    """Return the text; refuse bytes that are not UTF-8 unless the vocabulary is of bytes."""
    if vocab.kind != "bytes":
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            byte = ord(text[error.start]) - 0xDC00
            raise ValueError(
                f"{name} is not UTF-8 text: character {error.start:,} is the byte 0x{byte:02x}, "
                f"and the vocabulary has only {_KNOWN.get(vocab.kind, vocab.kind)}: convert the "
                "text to UTF-8, or use a model of bytes"
            ) from None
    return text
