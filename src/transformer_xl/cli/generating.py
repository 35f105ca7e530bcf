"""The command that lets a model write, and how any command loads one: generate."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from transformer_xl.cli.output import say, show
from transformer_xl.cli.runs import Value
from transformer_xl.config import Config, DataConfig, EvalConfig, GenerateConfig
from transformer_xl.recipes import recipe_of

if TYPE_CHECKING:
    import torch

    from transformer_xl.data import Vocab
    from transformer_xl.nn import LanguageModel

_KNOWN = {"imported": "the symbols of its vocabulary"}
_Unprefixed = tyro.conf.OmitArgPrefixes
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
    from transformer_xl.data.brought import is_vocabulary
    from transformer_xl.nn.pretrained import CONFIG_FILE, find_model_folder, load_config

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
    from transformer_xl.nn.pretrained import (
        CONFIG_FILE,
        find_model_folder,
        load_eval_config,
        read_config,
    )
    from transformer_xl.presets import preset_eval

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


@dataclass(kw_only=True)
class Generate:
    """Let a model write. It streams to the terminal, for as long as one likes.

    How it draws, what its folder says, [generate] of the run's recipe, if anything, and where an
    option says something else, that; which settings were used is said before the text. The same
    settings and seed write the same text here, by `txl serve` and in Python.
    """

    examples: ClassVar = (
        "txl generate runs/demo --prompt 'def main' --length 200",
        "txl generate runs/demo --length 0 --temperature 0.8 --top_p 0.95",
        "txl generate runs/demo --state session.safetensors --prompt 'class A'",
        "txl generate runs/demo --samples 8 --weights bfloat16 --json",
    )
    takes: ClassVar = "DIR"

    dir: tyro.conf.Suppress[Path] = Path()
    prompt_is_given: tyro.conf.Suppress[bool] = False
    seed_is_given: tyro.conf.Suppress[bool] = False
    settings: Annotated[GenerateConfig, _Unprefixed, Value] = field(default_factory=GenerateConfig)
    prompts: tuple[str, ...] = ()
    """Texts to continue side by side, instead of the one prompt."""
    samples: int = 1
    """Texts to write side by side for each prompt. Text n has the seed of the first plus n."""
    stop: tuple[str, ...] = ()
    """End before the first of these strings."""
    mem_len: int | None = None
    """Remembered positions; None: as the model was trained."""
    weights: Weights = "float32"
    """Precision of the weights: fewer bits are faster; txl eval says what they cost."""
    state: Path | None = None
    """Go on with the memory in this file if it exists, and save the memory there at the end."""
    json: bool = False
    """Print one JSON object at the end instead of the text as it comes."""

    def run(self) -> None:
        """Write text to the standard output."""
        from transformer_xl.device import pick_device

        self._check()
        loaded = self._weights_checksum()
        model, vocab = load(self.dir, pick_device(), self.weights)
        if self.prompts or self.samples > 1:
            self._write_several(model, vocab)
        else:
            self._write_one(model, vocab, loaded)

    def _check(self) -> None:
        if self.mem_len is not None and self.mem_len < 0:
            raise ValueError(f"mem_len={self.mem_len} must be at least 0")
        if self.samples < 1:
            raise ValueError(f"samples={self.samples} must be at least 1")
        if not all(self.stop):
            raise ValueError(
                "--stop: a stop string is empty, every text would end before it begins"
            )
        is_several = bool(self.prompts) or self.samples > 1
        if not self.settings.length and (self.json or is_several):
            what = "--json" if self.json else "several texts"
            needs = "needs" if self.json else "need"
            raise ValueError(f"length=0 writes without end: {what} {needs} a length")
        if is_several and self.state:
            raise ValueError("--state keeps the memory of one text: leave out --prompts, --samples")
        if self.prompts and self.prompt_is_given:
            raise ValueError("--prompt and --prompts: give one of them")

    def _weights_checksum(self) -> str:
        """Name the weights that are loaded: a training may replace them meanwhile."""
        from transformer_xl.nn.pretrained import find_model_folder
        from transformer_xl.nn.weights import weights_checksum, weights_path

        return weights_checksum(weights_path(find_model_folder(self.dir))) if self.state else ""

    def _write_one(self, model: "LanguageModel", vocab: "Vocab", weights: str) -> None:
        from transformer_xl.generate import generate, load_state, save_state, text_pieces

        text, prompt, mems = self.settings.prompt, [], None
        seed: Any = self.settings.seed
        if self.state and self.state.exists():
            state = load_state(self.state, weights, model)
            mems = state.mems
            # The recipe's prompt begins a text; what goes on has begun. So with the seed.
            text = text if self.prompt_is_given else ""
            if state.random is not None and not self.seed_is_given:
                seed = state.random
            prompt = [state.last_token]
        prompt += _encoded(text, vocab)
        settings = self._settings(model, seed if isinstance(seed, int) else None)
        drawn = generate(model, prompt, mems=mems, seed=seed, **self._drawing())
        with ended_by_signals():
            try:
                self._write(text, text_pieces(drawn, vocab, self.stop, prompt), settings)
            finally:
                if self.state:
                    save_state(self.state, drawn, weights)
                    say(f"the memory is in {self.state}; the same command goes on from there")

    def _write(self, prompt: str, pieces: Iterator[str], settings: dict[str, Any]) -> None:
        if self.json:
            found = {"prompt": prompt, "text": "".join(pieces), "settings": settings}
            show(found, as_json=True)
            return
        sys.stdout.write(prompt)
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")

    def _write_several(self, model: "LanguageModel", vocab: "Vocab") -> None:
        from transformer_xl.generate import batch_texts, generate_batch, seed_of

        begins = self.prompts or (self.settings.prompt,)
        prompts = [ids for text in begins for ids in [_encoded(text, vocab)] * self.samples]
        begins = [text for text in begins for _ in range(self.samples)]
        seed = self.settings.seed
        settings = self._settings(model, seed)
        batch = generate_batch(model, prompts, seed=seed, **self._drawing())
        texts = batch_texts(batch, vocab, self.stop, prompts)
        found = [
            {"prompt": prompt, "text": text, "seed": seed_of(seed, n)}
            for n, (prompt, text) in enumerate(zip(begins, texts, strict=True))
        ]
        if self.json:
            show({"texts": found, "settings": settings}, as_json=True)
            return
        for n, each in enumerate(found, 1):
            sys.stdout.write(f"--- {n} of {len(found)}, seed {each['seed']}\n")
            sys.stdout.write(f"{each['prompt']}{each['text']}\n")

    def _settings(self, model: "LanguageModel", seed: int | None) -> dict[str, Any]:
        """Return how the text is drawn, and say it; without a seed, an earlier draw goes on."""
        from transformer_xl.generate import Sampler
        from transformer_xl.nn.lengths import Lengths

        given = self.settings
        cuts = given.temperature, given.top_k, given.top_p
        drawing = Sampler(*cuts, model.config.vocab_size).settings
        mem_len = Lengths.of(model.config, mem_len=self.mem_len).mem_len
        found = {**drawing, "seed": seed, "mem_len": mem_len, "weights": self.weights}
        known = (f"{name} {'none' if x is None else x}" for name, x in found.items())
        say(f"drawing with {', '.join(known)}")
        return {**found, "length": given.length or None}

    def _drawing(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "length": settings.length or None,
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "mem_len": self.mem_len,
        }


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
    from transformer_xl.device import keep_freed_memory
    from transformer_xl.generate import open_folder

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


def _encoded(prompt: str, vocab: "Vocab") -> list[int]:
    """Cut a prompt into symbols; say what of it the model is not shown as it is."""
    return _told("the prompt", _checked(prompt, vocab, "the prompt"), vocab, vocab.encode)


def _told(name: str, text: str, vocab: "Vocab", encode: Callable[[str], list[int]]) -> list[int]:
    from transformer_xl.data.unknown import unknown_warning

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
