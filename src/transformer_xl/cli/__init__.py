"""The command `txl`, with one subcommand for each task."""

import inspect
import io
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, Union

from transformer_xl.cli.printing import say
from transformer_xl.config import GONE, is_disk_full, near
from transformer_xl.errors import SettingsError

_DESCRIPTION = """\
Transformer-XL: train, evaluate and serve a language model with a memory.

txl COMMAND --help describes a command.

To write with a model that comes with the package: txl generate shakespeare --prompt ROMEO:

To train one: txl train demo --out runs/demo

exit codes: 0 success, 1 failure, 2 usage error, 130 interrupted by Ctrl-C

shell completion: txl --tyro-print-completion bash (or zsh, tcsh)
"""
_OPTIONS = ("-h", "--help", "--version", "--tyro-print-completion", "--tyro-write-completion")
"""The options before a command."""


class Command(Protocol):
    """What is parsed from a command line."""

    def run(self) -> int | None:
        """Run the command; return the exit code, None for 0."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return 0 (success), 1 (failure), 2 (usage error) or 130 (Ctrl-C)."""
    if argv is None:
        argv = sys.argv[1:]
        _open_closed()
        _write_anything()
        # In fewer than 6 columns the parser would never end.
        if shutil.get_terminal_size().columns < 40:
            os.environ["COLUMNS"] = "40"
    try:
        code = _run([*argv])
        # At exit, a broken pipe or a full disk could no longer be reported.
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if (code := _explain(error)) is None:
            raise
    return code


def _run(argv: list[str]) -> int:
    """Run a command line; return its exit code."""
    if argv == ["--version"]:
        from transformer_xl import __version__

        print(__version__)
        return 0
    try:
        command = parse(argv or ["--help"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        return code if argv else 2
    if (name := getattr(command, "dir", None)) is not None:
        from transformer_xl.cli.loading import require_model

        require_model(name)
    if not getattr(command, "any_size", False):
        return command.run() or 0
    from transformer_xl.model import any_size

    with any_size():
        return command.run() or 0


def parse(argv: list[str]) -> "Command":
    """Parse a command line to a command.

    Raises:
        SystemExit: With 0 if help was requested, with 2 for a usage error.
        SettingsError: There is no such command.
    """
    # Imported late, so that Ctrl-C is handled from the start.
    import tyro

    _require_current(argv)
    kinds, how = commands(), (tyro.conf.FlagCreatePairsOff,)
    # Parsed by itself, so that a message about an option does not list those of other commands.
    if argv and (kind := kinds.get(argv[0])) is not None:
        prog, about = f"txl {argv[0]}", inspect.getdoc(kind)
        return tyro.cli(
            kind, prog=prog, description=about, args=argv[1:], use_underscores=True, config=how
        )
    if argv and argv[0].partition("=")[0] not in _OPTIONS:
        nearest = near(argv[0], [*kinds, *_OPTIONS])
        hint = f"did you mean {nearest}?" if nearest else f"the commands are {', '.join(kinds)}"
        raise SettingsError(f"there is no command or option {argv[0]}: {hint}")
    first_lines = {name: str(kind.__doc__).partition("\n")[0] for name, kind in kinds.items()}
    choices = tuple(
        Annotated[kind, tyro.conf.subcommand(name, description=first_lines[name])]
        for name, kind in kinds.items()
    )
    choice: Any = Union[choices]  # noqa: UP007  (of a tuple)
    return tyro.cli(
        choice, prog="txl", description=_DESCRIPTION, args=argv, use_underscores=True, config=how
    )


def _require_current(argv: list[str]) -> None:
    """Require no command and no option that an earlier version had.

    Raises:
        SettingsError: It is gone; with what replaces it.
    """
    command = "".join(argv[:1])
    options = [word.partition("=")[0][2:].replace("-", "_") for word in argv if word[:2] == "--"]
    for option in ("", *options):
        # A setting is an option of every command that takes it.
        setting = GONE.get(option) if "." in option else None
        if why := GONE.get(f"{command}.{option}".strip("."), setting):
            raise SettingsError(f"txl {command}{option and f' --{option}'} is gone: {why}")


def commands() -> "dict[str, type[Command]]":
    """Return the command classes by name."""
    from transformer_xl.cli.comparing import Compare
    from transformer_xl.cli.compressing import Compress, Decompress
    from transformer_xl.cli.evaluating import Eval
    from transformer_xl.cli.generating import Generate
    from transformer_xl.cli.models import Convert, Doctor, Export, Models, Serve
    from transformer_xl.cli.runs import Prepare, Recipes, Train
    from transformer_xl.cli.science import Ablate, Recl
    from transformer_xl.cli.scoring import Score
    from transformer_xl.cli.tasking import Task

    kinds = (
        *(Recipes, Prepare, Train, Models, Eval, Score, Generate, Convert, Export),
        *(Compress, Decompress, Serve, Recl, Ablate, Compare, Task, Doctor),
    )
    return {kind.__name__.lower(): kind for kind in kinds}


def _explain(error: BaseException) -> int | None:
    """Print why a command failed; return the exit code, None for an error in the program."""
    if isinstance(error, KeyboardInterrupt):
        say("\ninterrupted")
        return 130
    # A training stopped by a signal; its class cannot be imported without torch.
    if (number := getattr(error, "signal_number", None)) is not None:
        say(str(error))
        return 130 if number == signal.SIGINT else 0
    is_broken_pipe = isinstance(error, BrokenPipeError)
    if not isinstance(error, (ValueError, OSError, RuntimeError)) or (
        os.environ.get("TXL_TRACEBACK") and not is_broken_pipe
    ):
        return None
    # Unwritten output is discarded; Python would report the same error again at exit.
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not is_broken_pipe:
        is_unexplained = is_disk_full(error) and "disk is full" not in str(error)
        say(f"txl: {'the disk is full: ' * is_unexplained}{error}")
    return 2 if isinstance(error, ValueError) else 1


def _open_closed() -> None:
    """Open what the caller has closed (``2>&-``) of standard input, output and error.

    Otherwise the next file that is opened takes its place and gets what is written there, and
    messages are printed to the output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def _write_anything() -> None:
    """Let standard output and error take characters outside their encoding, and raw bytes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            is_utf8 = stream.encoding.lower().replace("-", "") == "utf8"
            stream.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")
