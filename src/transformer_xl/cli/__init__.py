"""The command `txl`: one verb for each thing one does with a model."""

import dataclasses
import difflib
import inspect
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from transformer_xl.cli.output import say
from transformer_xl.files import is_disk_full, require_model_place


@runtime_checkable
class Command(Protocol):
    """A parsed command line."""

    def run(self) -> int | None:
        """Do it; return the exit code, None for 0."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return 0 for done, 1 for failed, 2 for misused, 130 for Ctrl-C."""
    if argv is None:
        argv = sys.argv[1:]
        _write_anything()
    return _guarded(lambda: _run(list(argv)))


def parse(argv: list[str]) -> Command:
    """Turn a command line into a command.

    Raises:
        SystemExit: Help was asked for (0) or the line is wrong (2).
        ValueError: The recipe is wrong.
        OSError: The recipe cannot be read.
    """
    # The rest of the file must be ready for Ctrl-C before this takes its time.
    import tyro

    verbs = _verbs()
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview(verbs))
        raise SystemExit(0 if argv else 2)
    verb, rest = argv[0], argv[1:]
    if verb == "--version":
        from transformer_xl import __version__

        print(__version__)
        raise SystemExit(0)
    if verb not in verbs:
        near = difflib.get_close_matches(verb, verbs, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(verbs)}"
        say(f"txl: {verb!r} is no command; {hint}")
        raise SystemExit(2)
    kind = verbs[verb]
    prog, subject = f"txl {verb}", None
    # Such as bench evaluation-speed, which takes no recipe.
    if rest and rest[0] in (parts := getattr(kind, "parts", {})):
        prog, kind = f"{prog} {rest[0]}", parts[rest.pop(0)]
    if takes := getattr(kind, "takes", None):
        asks_help = rest[:1] in (["-h"], ["--help"])
        if not asks_help:
            if not rest or rest[0].startswith("-"):
                say(f"{prog}: {takes} comes first, as in: {kind.examples[0]}")
                raise SystemExit(2)
            subject = rest.pop(0)
        prog += f" {subject or takes}"
    _check_words(kind, rest)
    default = _defaults(kind, takes, subject, rest) if takes else None
    description = f"{inspect.getdoc(kind)}\n\nExamples:\n" + "\n".join(
        f"  {example}" for example in kind.examples
    )
    return tyro.cli(
        kind,
        prog=prog,
        description=description,
        args=rest,
        default=default,
        use_underscores=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _verbs() -> dict[str, Any]:
    from transformer_xl.cli.bench import Bench
    from transformer_xl.cli.compressing import Compress, Decompress
    from transformer_xl.cli.estimating import Estimate
    from transformer_xl.cli.evaluation import Eval, Report
    from transformer_xl.cli.exporting import Export
    from transformer_xl.cli.models import Generate
    from transformer_xl.cli.runs import Convert, Doctor, Prepare, Recipes, Train
    from transformer_xl.cli.science import Ablate, Recl
    from transformer_xl.cli.serving import Serve
    from transformer_xl.cli.streams import Score

    kinds = (
        *(Recipes, Prepare, Train, Eval, Report, Score, Generate, Convert, Export),
        *(Compress, Decompress),
        Serve,
        *(Recl, Ablate, Bench, Estimate, Doctor),
    )
    return {kind.__name__.lower(): kind for kind in kinds}


def _defaults(kind: Any, takes: str, subject: str | None, rest: list[str]) -> Any:
    """Return a command with the settings of its recipe or run folder."""
    import tyro

    from transformer_xl.cli.models import evaluation_of, recipe_of
    from transformer_xl.config import Config
    from transformer_xl.recipes import load_recipe

    if takes == "RECIPE":
        config = getattr(kind, "load", load_recipe)(subject or "demo")
    else:
        config = recipe_of(Path(subject)) if subject and takes == "DIR" else None
    values: dict[str, Any] = {}
    for section in dataclasses.fields(Config) if config else ():
        if section.name in kind.__annotations__:
            values[section.name] = getattr(config, section.name)
    if takes != "RECIPE":
        values[takes.lower()] = Path(subject or takes)
    if "eval" in kind.__annotations__ and takes == "DIR" and subject:
        preset = _value_of("--preset", rest)
        values["eval"] = evaluation_of(Path(subject), config, preset)
        if begin_with := getattr(kind, "begin_with", None):
            values["eval"] = begin_with(values["eval"], lambda flag: _value_of(flag, rest))
    if "settings" in kind.__annotations__:
        values["prompt_is_given"] = _value_of("--prompt", rest) is not None
        values["seed_is_given"] = _value_of("--seed", rest) is not None
        if config:
            values["settings"] = config.generate
    # What is required is still missing, which the constructor would not take.
    command = object.__new__(kind)
    for field in dataclasses.fields(kind):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        is_required = default is dataclasses.MISSING
        missing = tyro.MISSING if is_required else default
        setattr(command, field.name, values.get(field.name, missing))
    return command


def _check_words(kind: Any, words: list[str]) -> None:
    """Refuse values of ``--section.key`` as their section would: it says more than the parser."""
    from transformer_xl.config.checks import check_word

    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        section, is_setting, key = name.removeprefix("--").partition(".")
        held = getattr(kind, "__annotations__", {}).get(section)
        held = getattr(held, "__origin__", held)
        value = value if equals else following
        is_one = name.startswith("--") and is_setting and not value.startswith("--")
        if is_one and dataclasses.is_dataclass(held):
            check_word(f"{section}.{key}", value, held, key)  # pyright: ignore[reportArgumentType]


def _value_of(flag: str, words: list[str]) -> str | None:
    """Find what is given for a flag, of which others take their defaults."""
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else following
    return None


def _overview(verbs: dict[str, Any]) -> str:
    lines = [
        "usage: txl COMMAND ...",
        "",
        "Transformer-XL: train a language model that remembers, measure it, let it write.",
        "",
        *(f"  {verb:12}{(inspect.getdoc(kind) or '').splitlines()[0]}"
          for verb, kind in verbs.items()),
        "",
        "txl COMMAND --help says more. To begin: txl train demo --out runs/demo",
        "exit codes: 0 done, 1 failed, 2 misused, 130 stopped by Ctrl-C",
    ]  # fmt: skip
    return "\n".join(lines)


def _run(argv: list[str]) -> int:
    try:
        command = parse(argv)
        if getattr(command, "takes", None) == "DIR":
            require_model_place(command.dir)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return command.run() or 0
        except KeyboardInterrupt:
            has_saved = getattr(command, "has_saved", lambda: False)
            raise KeyboardInterrupt("; what was saved before is intact" * has_saved()) from None
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _guarded(run: Callable[[], int]) -> int:
    try:
        code = run()
        # Later nobody could be told that the reader has left or the disk is full.
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        say(f"\ninterrupted{stop}")
        return 130
    except BrokenPipeError:
        _drop_output()
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("TXL_TRACEBACK"):
            raise
        _drop_output()
        is_unexplained = is_disk_full(error) and "disk is full" not in str(error)
        say(f"txl: {'the disk is full: ' * is_unexplained}{error}")
        return 2 if isinstance(error, ValueError) else 1
    except Exception as error:
        # A run that was stopped by a signal; the class is not here before torch is.
        number = getattr(error, "signal_number", None)
        if number is None:
            raise
        say(str(error))
        return 130 if number == signal.SIGINT else 0
    return code


def _write_anything() -> None:
    """Let text pass that the terminal has no characters for, or that is no text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            is_utf8 = stream.encoding.lower().replace("-", "") == "utf8"
            stream.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


def _drop_output() -> None:
    """Forget what cannot be written; Python would complain of it once more when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
