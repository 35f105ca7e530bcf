"""The command `txl`: one verb for each thing one does with a model."""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

import tyro

from transformer_xl.config import (
    Config,
    DataConfig,
    EvalConfig,
    GenerateConfig,
    ModelConfig,
    TrainConfig,
)
from transformer_xl.recipes import load_recipe, recipe_names, recipe_text

# What a section of a recipe looks like on the command line: --section.key value, also for bool.
_Value = tyro.conf.FlagConversionOff
_Unprefixed = tyro.conf.OmitArgPrefixes


class Command(Protocol):
    """A parsed command line."""

    def run(self) -> int | None:
        """Do it; return the exit code, None for 0."""
        ...


@dataclass(kw_only=True)
class Recipes:
    """List the recipes that come with the package, show one, or copy one to change it."""

    examples: ClassVar = ("txl recipes", "txl recipes demo", "txl recipes demo --copy mine.toml")

    name: Annotated[str, tyro.conf.Positional] = ""
    """The recipe to show or copy."""
    copy: Path | None = None
    """Write the recipe to this new file."""

    def run(self) -> None:
        """Print or copy."""
        if not self.name:
            for name in recipe_names():
                print(f"{name:24}{recipe_text(name).splitlines()[1].removeprefix('# ')}")
        elif self.copy is None:
            print(recipe_text(self.name), end="")
        else:
            with self.copy.open("x", encoding="utf-8") as file:
                file.write(recipe_text(self.name))
            _say(f"wrote {self.copy}; train it with: txl train {self.copy} --out runs/mine")


@dataclass(kw_only=True)
class Prepare:
    """Fetch the text of a recipe, cut it into tokens and keep them; training does so by itself."""

    examples: ClassVar = (
        "txl prepare demo",
        "txl prepare shakespeare-char-cpu --data.path input.txt",
        "txl prepare my.toml --data.vocab bpe",
    )
    takes: ClassVar = "RECIPE"

    data: Annotated[DataConfig, _Value]

    def run(self) -> None:
        """Build the corpus."""
        from transformer_xl.data import prepare

        corpus = prepare(self.data, _say)
        splits = {name: corpus.n_tokens(name) for name in ("train", "valid", "test")}
        print(json.dumps({"folder": str(corpus.folder), "vocab": len(corpus.vocab), **splits}))


@dataclass(kw_only=True)
class Train:
    """Train a model by a recipe; the same command goes on with a run that was stopped.

    Any setting of the recipe can be changed here. Ctrl-C saves and stops.
    """

    examples: ClassVar = (
        "txl train demo --out runs/demo",
        "txl train shakespeare-char-cpu --out runs/bard --train.seed 2",
        "txl train mine.toml --out runs/mine --model.mem_len 256 --data.path corpus/",
    )
    takes: ClassVar = "RECIPE"

    out: Path
    """The run folder: made when it is new, resumed when it holds a run of the same recipe."""
    json: bool = False
    """Print the result as one JSON object on the last line."""
    model: Annotated[ModelConfig, _Value]
    data: Annotated[DataConfig, _Value]
    train: Annotated[TrainConfig, _Value]
    eval: Annotated[EvalConfig, _Value]
    generate: Annotated[GenerateConfig, _Value]

    def run(self) -> None:
        """Train, evaluate, report."""
        from transformer_xl.train import train

        config = Config(
            model=self.model,
            data=self.data,
            train=self.train,
            eval=self.eval,
            generate=self.generate,
        )
        results = train(config, self.out)
        flat = results["test"] | {k: x for k, x in results.items() if k.endswith("per_byte")}
        _print_result(flat, self.json)
        _say(f"now try: txl generate {self.out} --prompt 'some text to continue'")


@dataclass(kw_only=True)
class Eval:
    """Measure how well a model predicts a text, with any memory length."""

    examples: ClassVar = (
        "txl eval runs/demo --eval.split test",
        "txl eval runs/demo --eval.mem_len 1024 --json",
        "txl eval runs/demo --file notes.txt",
    )
    takes: ClassVar = "DIR"

    dir: tyro.conf.Suppress[Path] = Path()
    file: Path | None = None
    """Evaluate this text instead of the corpus of the run."""
    json: bool = False
    """Print the result as one JSON object on the last line."""
    eval: Annotated[EvalConfig, _Value] = field(default_factory=EvalConfig)
    data: Annotated[DataConfig, _Value] = field(default_factory=DataConfig)

    def run(self) -> None:
        """Evaluate and print."""
        from transformer_xl.device import autocast, pick_device
        from transformer_xl.evaluate import evaluate
        from transformer_xl.train.finish import describe

        model, vocab = _load(self.dir)
        device = pick_device()
        split = str(self.file or self.eval.split)
        recipe = _recipe_of(self.dir)
        segment_len = self.eval.segment_len or (recipe.train.segment_len if recipe else 128)
        precision = recipe.train.precision if recipe else "float32"
        with autocast(precision, device):
            result = evaluate(
                model.to(device),
                _tokens(self, vocab),
                segment_len=segment_len,
                mem_len=self.eval.mem_len,
                attn_len=self.eval.attn_len,
                clamp_len=self.eval.clamp_len,
                batch_size=self.eval.batch_size,
                token_bytes=vocab.token_bytes,
            )
        _print_result(describe(split, result), self.json)


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

    def run(self) -> None:
        """Score and print."""
        from transformer_xl.device import pick_device
        from transformer_xl.evaluate import score

        model, vocab = _load(self.dir)
        ids = vocab.encode(_read_text(self.file))
        lines = score(
            model.to(pick_device()), ids, segment_len=self.segment_len, mem_len=self.mem_len
        )
        for token, log_prob in zip(ids, lines, strict=True):
            value = {"id": token, "text": vocab.decode([token]), "log_prob": log_prob}
            print(json.dumps(value, ensure_ascii=False))


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
    settings: Annotated[GenerateConfig, _Unprefixed, _Value] = field(
        default_factory=GenerateConfig
    )
    stop: tuple[str, ...] = ()
    """End before the first of these strings."""
    mem_len: int | None = None
    """Remembered positions; None: as the model was trained."""
    state: Path | None = None
    """Go on with the memory in this file if it exists, and save the memory there at the end."""

    def run(self) -> None:
        """Write text to the standard output."""
        from transformer_xl.device import pick_device
        from transformer_xl.generate import generate, load_state, save_state, text_pieces
        from transformer_xl.nn.pretrained import find_model_folder

        model, vocab = _load(self.dir)
        model = model.to(pick_device())
        weights = find_model_folder(self.dir) / "model.safetensors"
        settings = self.settings
        prompt = vocab.encode(settings.prompt)
        mems = None
        if self.state and self.state.exists():
            mems, last_token = load_state(self.state, weights)
            mems = mems.to(pick_device())
            prompt = [last_token, *prompt]
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
            sys.stdout.write(settings.prompt)
            for piece in text_pieces(drawn, vocab, self.stop, prompt):
                sys.stdout.write(piece)
                sys.stdout.flush()
            sys.stdout.write("\n")
        finally:
            if self.state:
                save_state(self.state, drawn, weights)
                _say(f"the memory is in {self.state}; the same command goes on from there")


@dataclass(kw_only=True)
class Doctor:
    """Say what this machine offers and what would be used of it, and why."""

    examples: ClassVar = ("txl doctor", "txl doctor --json")

    json: bool = False
    """Print one JSON object."""

    def run(self) -> None:
        """Print the diagnosis."""
        from transformer_xl.doctor import diagnose

        _print_result(diagnose(), self.json)


VERBS: dict[str, type] = {
    "recipes": Recipes,
    "prepare": Prepare,
    "train": Train,
    "eval": Eval,
    "score": Score,
    "generate": Generate,
    "doctor": Doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return 0 for done, 1 for failed, 2 for misused, 130 for Ctrl-C."""
    try:
        return _guarded(lambda: parse(list(sys.argv[1:] if argv is None else argv)).run())
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def parse(argv: list[str]) -> Command:
    """Turn a command line into a command.

    Raises:
        SystemExit: Help was asked for (0) or the line is wrong (2).
        ValueError: The recipe is wrong.
        OSError: The recipe cannot be read.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        raise SystemExit(0 if argv else 2)
    verb, rest = argv[0], argv[1:]
    if verb == "--version":
        from transformer_xl import __version__

        print(__version__)
        raise SystemExit(0)
    if verb not in VERBS:
        _say(f"txl: {verb!r} is no command; there are {', '.join(VERBS)}")
        raise SystemExit(2)
    kind = VERBS[verb]
    prog, default = f"txl {verb}", None
    if takes := getattr(kind, "takes", None):
        prog += f" {takes}"
        asks_help = rest and rest[0] in ("-h", "--help")
        if not asks_help and (not rest or rest[0].startswith("-")):
            _say(f"{prog}: {takes} comes first; {prog} --help says more")
            raise SystemExit(2)
        subject = rest.pop(0) if rest and not asks_help else None
        default = _defaults(kind, takes, subject)
    description = f"{kind.__doc__}\n\nExamples:\n" + "\n".join(f"  {x}" for x in kind.examples)
    return tyro.cli(
        kind, prog=prog, description=description, args=rest, default=default, use_underscores=True
    )


def _defaults(kind: type, takes: str, subject: str | None) -> Any:
    """Return a command with the settings of its recipe or run folder."""
    if takes == "RECIPE":
        config = load_recipe(subject or "demo")
    else:
        config = _recipe_of(Path(subject)) if subject else None
    values: dict[str, Any] = {}
    for section in dataclasses.fields(Config) if config else ():
        if section.name in kind.__annotations__:
            values[section.name] = getattr(config, section.name)
    if takes == "DIR":
        values["dir"] = Path(subject or "DIR")
        if "settings" in kind.__annotations__ and config:
            values["settings"] = config.generate
    for required in dataclasses.fields(kind):
        if required.default is required.default_factory is dataclasses.MISSING:
            values.setdefault(required.name, tyro.MISSING)
    return kind(**values)


def _overview() -> str:
    lines = [
        "usage: txl COMMAND ...",
        "",
        "Transformer-XL: train a language model that remembers, measure it, let it write.",
        "",
        *(f"  {verb:10}{(kind.__doc__ or '').splitlines()[0]}" for verb, kind in VERBS.items()),
        "",
        "txl COMMAND --help says more. To begin: txl train demo --out runs/demo",
    ]
    return "\n".join(lines)


def _guarded(run: Callable[[], int | None]) -> int:
    try:
        return run() or 0
    except KeyboardInterrupt:
        _say("\ninterrupted; what was saved before is intact")
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("TXL_TRACEBACK"):
            raise
        _say(f"txl: {error}")
        return 2 if isinstance(error, ValueError) else 1
    except Exception as error:
        number = getattr(error, "signal_number", None)
        if number is None:
            raise
        _say(str(error))
        return 130 if number == signal.SIGINT else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _print_result(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values))
        return
    for key, value in values.items():
        shown = f"{value:.4f}" if isinstance(value, float) else value
        if isinstance(value, dict):
            shown = ", ".join(f"{name} {x}" for name, x in value.items())
        print(f"{key:20} {shown}")


def _recipe_of(folder: Path) -> Config | None:
    recipe = folder / "recipe.toml"
    return load_recipe(recipe) if recipe.is_file() else None


def _load(folder: Path) -> tuple[Any, Any]:
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


def _read_text(path: Path) -> str:
    raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _tokens(command: Eval, vocab: Any) -> Any:
    if command.file:
        return vocab.encode(_read_text(command.file))
    from transformer_xl.data import prepare

    corpus = prepare(command.data, _say)
    if corpus.vocab.hash != vocab.hash:
        raise ValueError(
            f"the vocabulary of the corpus is not the one of the model in {command.dir}: give "
            "the text the model was trained on with --data.path, or any text with --file"
        )
    return corpus.split(command.eval.split)
