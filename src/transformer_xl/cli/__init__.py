"""The command `txl`: one subcommand for each thing one does with a model."""

import inspect
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from typing import Annotated, Any, Protocol, Union, runtime_checkable

from transformer_xl.cli.printing import say
from transformer_xl.config.files import is_disk_full, require_model_place

_DESCRIPTION = """\
Transformer-XL: train a language model that remembers, evaluate it, generate text with it.

txl COMMAND --help says more. To begin: txl train demo --out runs/demo

exit codes: 0 done, 1 failed, 2 misused, 130 stopped by Ctrl-C

completion for a shell: txl --tyro-print-completion bash (or zsh, tcsh)
"""


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
    """
    # The rest of the file must be ready for Ctrl-C before this takes its time.
    import tyro

    kinds = tuple(
        Annotated[kind, tyro.conf.subcommand(name, description=_Description(kind))]
        for name, kind in commands().items()
    )
    # As the parser itself wraps what is no class, and leaves this name out of its messages; but
    # with a help text, for which it would search the source code of typing at each start.
    nothing: Any = lambda: None  # noqa: E731
    argument = tyro.conf.arg(name="", help=nothing)
    choice = Annotated[Union[kinds], argument]  # noqa: UP007  (of a tuple)
    line: Any = make_dataclass("CommandLine", [("__tyro_dummy_inner__", choice)])
    return tyro.cli(
        line,
        prog="txl",
        description=_DESCRIPTION,
        args=argv,
        use_underscores=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    ).__tyro_dummy_inner__


def commands() -> dict[str, Any]:
    """Return the classes of the commands by their names."""
    from transformer_xl.cli.benching import Bench
    from transformer_xl.cli.compressing import Compress, Decompress
    from transformer_xl.cli.estimating import Estimate
    from transformer_xl.cli.evaluating import Eval, Report
    from transformer_xl.cli.exporting import Export
    from transformer_xl.cli.generating import Generate
    from transformer_xl.cli.runs import Convert, Doctor, Prepare, Recipes, Train
    from transformer_xl.cli.science import Ablate, Recl
    from transformer_xl.cli.scoring import Score
    from transformer_xl.cli.serving import Serve

    kinds = (
        *(Recipes, Prepare, Train, Eval, Report, Score, Generate, Convert, Export),
        *(Compress, Decompress),
        Serve,
        *(Recl, Ablate, Bench, Estimate, Doctor),
    )
    return {kind.__name__.lower(): kind for kind in kinds}


class _Description(str):
    """What a command does: a line in the list of commands, and all of it in its own help."""

    __slots__ = ("_kind",)

    def __new__(cls, kind: Any) -> "_Description":
        description = super().__new__(cls, (kind.__doc__ or "").partition("\n")[0])
        description._kind = kind
        return description

    def __call__(self) -> str:
        # The parser calls what can be called when it prints the help of the command.
        examples = "".join(f"\n  {example}" for example in self._kind.examples)
        return f"{inspect.getdoc(self._kind)}\n\nExamples:{examples}"


def _run(argv: list[str]) -> int:
    if argv == ["--version"]:
        from transformer_xl import __version__

        print(__version__)
        return 0
    from transformer_xl.cli.given import check_given

    try:
        command = parse(argv or ["--help"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        return code if argv else 2
    check_given(command)
    if (folder := getattr(command, "dir", None)) is not None:
        require_model_place(folder)
    try:
        return command.run() or 0
    except KeyboardInterrupt:
        has_saved = getattr(command, "has_saved", lambda: False)
        raise KeyboardInterrupt("; what was saved before is intact" * has_saved()) from None


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
