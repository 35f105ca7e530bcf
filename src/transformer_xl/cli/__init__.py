"""The command `txl`, with one subcommand for each task."""

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
Transformer-XL: train, evaluate and serve a language model with a memory.

txl COMMAND --help describes a command. To start: txl train demo --out runs/demo

exit codes: 0 success, 1 failure, 2 usage error, 130 interrupted by Ctrl-C

shell completion: txl --tyro-print-completion bash (or zsh, tcsh)
"""


@runtime_checkable
class Command(Protocol):
    """A parsed command line."""

    def run(self) -> int | None:
        """Run the command; return the exit code, None for 0."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return 0 (success), 1 (failure), 2 (usage error) or 130 (Ctrl-C)."""
    if argv is None:
        argv = sys.argv[1:]
        _write_anything()
    return _guarded(lambda: _run(list(argv)))


def parse(argv: list[str]) -> Command:
    """Parse a command line.

    Raises:
        SystemExit: With 0 if help was requested, with 2 for a usage error.
    """
    # Imported late, so that Ctrl-C is handled from the start.
    import tyro

    kinds = tuple(
        Annotated[kind, tyro.conf.subcommand(name, description=_Description(kind))]
        for name, kind in commands().items()
    )
    # The parser wraps a union in such a class itself; here with a help text, without which it
    # would search the source code of typing at each start.
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
    """Return the command classes by name."""
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
    """A command's description: one line in the list of commands, all of it in its own help."""

    __slots__ = ("_kind",)

    def __new__(cls, kind: Any) -> "_Description":
        description = super().__new__(cls, (kind.__doc__ or "").partition("\n")[0])
        description._kind = kind
        return description

    def __call__(self) -> str:
        # The parser calls it only when it prints the help of the command.
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
        # At exit, a broken pipe or a full disk could no longer be reported.
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
        # A training stopped by a signal; its class cannot be imported without torch.
        number = getattr(error, "signal_number", None)
        if number is None:
            raise
        say(str(error))
        return 130 if number == signal.SIGINT else 0
    return code


def _write_anything() -> None:
    """Let standard output and error take characters outside their encoding, and raw bytes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            is_utf8 = stream.encoding.lower().replace("-", "") == "utf8"
            stream.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


def _drop_output() -> None:
    """Discard unwritten output; Python would report the same error again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
