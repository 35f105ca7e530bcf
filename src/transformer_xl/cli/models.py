"""The commands that use a model: eval, score and generate."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from transformer_xl.cli.output import say, show
from transformer_xl.cli.runs import Value
from transformer_xl.config import Config, DataConfig, EvalConfig, GenerateConfig
from transformer_xl.recipes import load_recipe

if TYPE_CHECKING:
    from transformer_xl.data import Vocab
    from transformer_xl.nn import TransformerXL

_KNOWN = {"imported": "the symbols of its vocabulary"}
_Unprefixed = tyro.conf.OmitArgPrefixes


def recipe_of(folder: Path) -> Config | None:
    """Return the recipe of a run folder, or of the run that a model folder lies in."""
    folders = [folder]
    if folder.parent.name == "model":
        folders.append(folder.parent.parent)
    recipes = (place / "recipe.toml" for place in folders)
    return next((load_recipe(recipe) for recipe in recipes if recipe.is_file()), None)


def evaluation_of(folder: Path, recipe: Config | None, preset: str | None) -> EvalConfig:
    """Return how a model is evaluated: as a preset says, its recipe, or its settings file.

    Raises:
        ValueError: There is no such preset, or the settings file is wrong.
    """
    if not preset and recipe:
        return recipe.eval
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
class Eval:
    """Measure how well a model predicts a text, with any memory length."""

    examples: ClassVar = (
        "txl eval runs/demo --eval.split test",
        "txl eval runs/demo --eval.mem_len 1024 --json",
        "txl eval runs/demo --file notes.txt",
        "txl eval models/wt103 --preset wt103-large --file wiki.test.tokens",
    )
    takes: ClassVar = "DIR"

    dir: tyro.conf.Suppress[Path] = Path()
    preset: str | None = None
    """The lengths with which a model was published, such as wt103-large, on prepared text."""
    prepared: bool = False
    """The text of --file is cut into words by spaces already, as wiki.test.tokens is."""
    file: Path | None = None
    """Evaluate this text instead of the corpus of the run; - reads the standard input."""
    json: bool = False
    """Print the result as one JSON object on the last line."""
    eval: Annotated[EvalConfig, Value] = field(default_factory=EvalConfig)
    data: Annotated[DataConfig, Value] = field(default_factory=DataConfig)

    def run(self) -> None:
        """Evaluate and print."""
        from transformer_xl.device import autocast, pick_device
        from transformer_xl.evaluate import evaluate
        from transformer_xl.train.finish import describe

        model, vocab = _load(self.dir)
        device = pick_device()
        split = str(self.file or self.eval.split)
        recipe = recipe_of(self.dir)
        segment_len = self.eval.segment_len or (recipe.train.segment_len if recipe else 128)
        precision = recipe.train.precision if recipe else "float32"
        with autocast(precision, device):
            result = evaluate(
                model.to(device),
                self._tokens(vocab),
                segment_len=segment_len,
                batch_size=self.eval.batch_size,
                token_bytes=vocab.token_bytes,
                **self.eval.lengths,
            )
        show(describe(split, result), as_json=self.json)

    def _tokens(self, vocab: "Vocab") -> Any:
        if self.file:
            text = _read_text(self.file, vocab)
            return vocab.encode_lines(text, prepared=self.prepared or bool(self.preset))
        if not (self.data.name or self.data.path):
            raise ValueError(
                f"{self.dir} is a model without the recipe of its run, which says on what text it "
                "was trained: give any text with --file, or the run folder instead"
            )
        from transformer_xl.data import prepare

        corpus = prepare(self.data, say)
        if corpus.vocab.hash != vocab.hash:
            raise ValueError(
                f"the vocabulary of the corpus is not the one of the model in {self.dir}: give "
                "the text the model was trained on with --data.path, or any text with --file"
            )
        return corpus.split(self.eval.split)


@dataclass(kw_only=True)
class Score:
    """Write the log-probability (in nats) of every token of a text, a JSON object a line."""

    examples: ClassVar = ("txl score runs/demo notes.txt", "cat notes.txt | txl score runs/demo -")
    takes: ClassVar = "DIR"

    dir: tyro.conf.Suppress[Path] = Path()
    file: Annotated[Path, tyro.conf.Positional]
    """The text; - reads the standard input."""
    mem_len: int | None = None
    """Remembered positions; None: as the model was trained."""
    segment_len: int = 128
    """Tokens read at once."""
    json: bool = False
    """Print one JSON object for all tokens: their ids, log_probs and the mean nll."""

    def run(self) -> None:
        """Score and print."""
        from transformer_xl.device import pick_device
        from transformer_xl.evaluate import score

        for name, value, least in (
            ("segment_len", self.segment_len, 1),
            ("mem_len", self.mem_len, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        model, vocab = _load(self.dir)
        ids = vocab.encode_lines(_read_text(self.file, vocab))
        log_probs = score(
            model.to(pick_device()), ids, segment_len=self.segment_len, mem_len=self.mem_len
        )
        if self.json:
            found = list(log_probs)
            known = [x for x in found if x is not None]
            nll = -sum(known) / len(known) if known else None
            show({"tokens": len(known), "nll": nll, "ids": ids, "log_probs": found}, as_json=True)
            return
        for token, log_prob in zip(ids, log_probs, strict=True):
            show({"id": token, "text": vocab.decode([token]), "log_prob": log_prob}, as_json=True)


@dataclass(kw_only=True)
class Generate:
    """Let a model write. It streams to the terminal, for as long as one likes."""

    examples: ClassVar = (
        "txl generate runs/demo --prompt 'def main' --length 200",
        "txl generate runs/demo --length 0 --temperature 0.8 --top_p 0.95",
        "txl generate runs/demo --state session.safetensors --prompt 'class A'",
    )
    takes: ClassVar = "DIR"

    dir: tyro.conf.Suppress[Path] = Path()
    prompt_is_given: tyro.conf.Suppress[bool] = False
    settings: Annotated[GenerateConfig, _Unprefixed, Value] = field(default_factory=GenerateConfig)
    stop: tuple[str, ...] = ()
    """End before the first of these strings."""
    mem_len: int | None = None
    """Remembered positions; None: as the model was trained."""
    state: Path | None = None
    """Go on with the memory in this file if it exists, and save the memory there at the end."""
    json: bool = False
    """Print one JSON object at the end instead of the text as it comes."""

    def run(self) -> None:
        """Write text to the standard output."""
        from transformer_xl.device import pick_device
        from transformer_xl.generate import generate, load_state, save_state, text_pieces
        from transformer_xl.nn.pretrained import find_model_folder

        if self.mem_len is not None and self.mem_len < 0:
            raise ValueError(f"mem_len={self.mem_len} must be at least 0")
        if self.json and not self.settings.length:
            raise ValueError("length=0 writes without end: --json needs a length")
        model, vocab = _load(self.dir)
        model = model.to(pick_device())
        weights = find_model_folder(self.dir) / "model.safetensors"
        settings = self.settings
        text, prompt, mems = settings.prompt, [], None
        if self.state and self.state.exists():
            mems, last_token = load_state(self.state, weights)
            mems = mems.to(pick_device())
            # The recipe's prompt begins a text; what goes on has begun.
            text = text if self.prompt_is_given else ""
            prompt = [last_token]
        prompt += vocab.encode(_checked(text, vocab, "the prompt"))
        drawn = generate(
            model,
            prompt,
            length=settings.length or None,
            mems=mems,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            seed=settings.seed,
            mem_len=self.mem_len,
        )
        try:
            self._write(text, text_pieces(drawn, vocab, self.stop, prompt))
        finally:
            if self.state:
                save_state(self.state, drawn, weights)
                say(f"the memory is in {self.state}; the same command goes on from there")

    def _write(self, prompt: str, pieces: Iterator[str]) -> None:
        if self.json:
            show({"prompt": prompt, "text": "".join(pieces)}, as_json=True)
            return
        sys.stdout.write(prompt)
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")


def _load(folder: Path) -> tuple["TransformerXL", "Vocab"]:
    from transformer_xl.data import load_vocab
    from transformer_xl.nn import TransformerXL
    from transformer_xl.nn.pretrained import find_model_folder

    folder = find_model_folder(folder)
    model, vocab = TransformerXL.from_pretrained(folder), load_vocab(folder)
    if len(vocab) != model.config.vocab_size:
        raise ValueError(
            f"the vocabulary in {folder} has {len(vocab)} symbols and the model "
            f"{model.config.vocab_size}: they do not belong together"
        )
    return model, vocab


def _read_text(path: Path, vocab: "Vocab") -> str:
    is_stdin = str(path) == "-"
    try:
        raw = sys.stdin.buffer.read() if is_stdin else path.read_bytes()
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}") from error
    name = "the standard input" if is_stdin else str(path)
    return _checked(raw.decode("utf-8", "surrogateescape"), vocab, name)


def _checked(text: str, vocab: "Vocab", name: str) -> str:
    """Refuse bytes that are no UTF-8, unless bytes are what the vocabulary is made of."""
    if vocab.kind != "bytes":
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            byte = ord(text[error.start]) - 0xDC00
            raise ValueError(
                f"{name} is no UTF-8 text: character {error.start:,} is the byte 0x{byte:02x}, "
                f"and the model knows only {_KNOWN.get(vocab.kind, vocab.kind)}"
            ) from None
    return text
