"""What several commands have in common: how they load a model, and how they read a text."""

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

_KNOWN = {"imported": "the symbols of its vocabulary"}
# Told apart here, so that help needs no torch.
Weights = Literal["float32", "bfloat16", "int8"]


def continuation_of(folder: Path) -> Config:
    """Return a recipe that goes on from a model: its network, vocabulary and weights.

    How to train, evaluate and write comes from the run that made it, if its recipe is there.

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
    """Return a text that the vocabulary has symbols for; in some a line break is none."""
    for text in ("\n", "The", "the", *vocab.symbols):
        try:
            if vocab.encode(text):
                return text
        except ValueError:
            continue
    return "\n"


def evaluation_of(folder: Path, recipe: Config | None, preset: str | None) -> EvalConfig:
    """Return how a model is evaluated: as a preset says, its recipe, or its settings file.

    Raises:
        ValueError: There is no such preset, or the settings file is wrong.
    """
    if not preset and recipe:
        return recipe.eval
    if not preset and not folder.exists():
        # Said before the command runs.
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
        # Said when the model is loaded.
        config = None
    if not preset:
        return (config and load_eval_config(config)) or EvalConfig()
    origin = read_config(config).get("origin") if config else None
    written_by = origin.get("format") if isinstance(origin, dict) else None
    return preset_eval(preset, keys_beyond_memory=int(written_by in ("tensorflow", "nvidia")))


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end a ``with`` block as Ctrl-C does: what is saved at its end is saved."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def load(folder: Path, device: "torch.device", weights: Weights) -> tuple["LanguageModel", "Vocab"]:
    """Load the model of a folder, or the best of a run, with its vocabulary.

    Raises:
        FileNotFoundError: There is none.
        RuntimeError: A file is damaged.
        ValueError: The settings are wrong, or model and vocabulary do not belong together.
    """
    from transformer_xl.config.device import keep_freed_memory
    from transformer_xl.inference.generate import open_folder

    keep_freed_memory()
    return open_folder(folder, device, weights)


def require_text(path: Path) -> None:
    """Check, before anything is loaded, that a file can be read and holds something.

    Raises:
        OSError: It cannot be read.
        ValueError: It is empty.
    """
    # What flows, as a named pipe does, can be opened only once.
    if str(path) == "-" or (path.exists() and not (path.is_file() or path.is_dir())):
        return
    try:
        with path.open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}") from error
    if is_empty:
        raise ValueError(
            f"{path} is empty, a text of 0 tokens: at least 2 are needed to predict one"
        )


def read_text(path: Path, vocab: "Vocab") -> str:
    """Read a text that the vocabulary can cut; - is the standard input.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no UTF-8, and the vocabulary is not one of bytes.
    """
    is_stdin = str(path) == "-"
    try:
        raw = sys.stdin.buffer.read() if is_stdin else path.read_bytes()
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}") from error
    name = "the standard input" if is_stdin else str(path)
    return _checked(raw.decode("utf-8", "surrogateescape"), vocab, name)


def encoded_text(path: Path, text: str, vocab: "Vocab", *, prepared: bool = False) -> list[int]:
    """Cut a text that was read from a file; say what of it the model is not shown as it is.

    Raises:
        ValueError: It has symbols that the vocabulary lacks.
    """
    name = "the standard input" if str(path) == "-" else str(path)
    return _told(name, text, vocab, lambda text: vocab.encode_lines(text, prepared=prepared))


def encoded_prompt(prompt: str, vocab: "Vocab") -> list[int]:
    """Cut a prompt into symbols; say what of it the model is not shown as it is."""
    return _told("the prompt", _checked(prompt, vocab, "the prompt"), vocab, vocab.encode)


def _told(name: str, text: str, vocab: "Vocab", encode: Callable[[str], list[int]]) -> list[int]:
    from transformer_xl.data.vocab import unknown_warning

    try:
        ids = encode(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if warning := unknown_warning(vocab, text, ids):
        say(f"warning: {name}: {warning}")
    return ids


def _checked(text: str, vocab: "Vocab", name: str) -> str:
    """Refuse bytes that are no UTF-8, unless bytes are what the vocabulary is made of."""
    if vocab.kind != "bytes":
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            byte = ord(text[error.start]) - 0xDC00
            raise ValueError(
                f"{name} is no UTF-8 text: character {error.start:,} is the byte 0x{byte:02x}, "
                f"and the model knows only {_KNOWN.get(vocab.kind, vocab.kind)}: convert the text "
                "to UTF-8, or use a model of bytes"
            ) from None
    return text
