"""The command `txl`, with one subcommand for each task."""

import inspect
import io
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Union

from transformer_xl.cli.printing import say
from transformer_xl.config import is_disk_full, near
from transformer_xl.errors import SettingsError

_DESCRIPTION = """\
Transformer-XL: train, evaluate and serve a language model with a memory.

txl COMMAND --help describes a command. To start: txl train demo --out runs/demo

exit codes: 0 success, 1 failure, 2 usage error, 130 interrupted by Ctrl-C

shell completion: txl --tyro-print-completion bash (or zsh, tcsh)
"""
_GONE = {
    ("bench", ""): (
        "txl doctor says how fast a model is on this machine, and "
        "benchmarks/evaluation_speed.py measures the paper's Table 9"
    ),
    ("compare", "--jobs"): "runs are made one after the other, each with all threads",
    ("compress", "--seed"): "an untrained model always begins with the same weights; leave it out",
    ("convert", "--to"): (
        "old formats are not written any more; a model folder is written without it, and "
        "transformers 5 reads one after import transformer_xl.hf"
    ),
    ("estimate", ""): "docs/scale.md has the formulas, and the figures of the paper's recipes",
    ("eval", "--by_position"): "txl eval --eval.mem_lens says what a longer memory is worth",
    ("eval", "--preset"): (
        "txl convert writes the lengths with which a model was published into its folder, and the "
        "recipes paper-* have them, for --mem_len, --attn_len and so on; a text that is split "
        "into words, as wiki.test.tokens is, needs --prepared"
    ),
    **dict.fromkeys(
        (
            (command, f"--knn.{x}")
            for command in ("eval", "generate")
            for x in ("k", "share", "temperature", "window")
        ),
        "the distribution is that of the model alone; leave it out",
    ),
    **dict.fromkeys(
        (("generate", "--presence_penalty"), ("generate", "--frequency_penalty")),
        "--repetition_penalty or --dry_multiplier is for repetitions",
    ),
    **{
        ("generate", f"--{name}"): f"{what}; leave it out"
        for name, what in (
            ("beam_size", "model.generate(..., num_beams=4) of transformers searches with beams"),
            ("length_penalty", "it was for beam search, which transformers has"),
            ("typical_p", "--top_p or --min_p limits the tokens"),
            ("penalty_window", "penalties consider the last 1,024 tokens"),
            ("dry_base", "the factor of DRY is 1.75"),
            ("dry_sequence_breakers", "no repetition of DRY goes beyond a line break"),
            ("loop_max_period", "a loop repeats at most 256 tokens"),
            ("loop_min_count", "a loop repeats them at least 4 times"),
        )
    },
    ("recipes", "--from_authors"): (
        "txl recipes paper-wt103-base --copy FILE copies a training of the paper, and "
        "docs/migration.md has the settings that take the place of the authors' options"
    ),
    ("report", ""): (
        "a report is written when a training ends; the same command txl train writes it again"
    ),
    ("recl", "--plot"): "--json has the gains, from which any program draws the curve",
    ("recl", "--recl.first"): "the shortest context is a step long; --recl.step sets both",
    ("recl", "--recl.threshold"): "a longer context counts from a gain of 0.01, as in the paper",
    ("recl", "--recl.batch_tokens"): "a batch has about 16,384 tokens",
    ("train", "--train.loss_scale"): "the scale of the loss in float16 is found by itself",
    **dict.fromkeys(
        (("train", f"--train.{name}") for name in ("patience", "decay_rate")),
        "the schedule plateau is gone; constant_cooldown ends a training in its time",
    ),
    **dict.fromkeys(
        (("train", f"--train.{name}") for name in ("skip_norm", "spike")),
        "updates are skipped where the gradient is not finite, and no others",
    ),
    ("serve", "--api_keys"): "TXL_API_KEY has several keys, one a line",
    ("serve", "--max_texts"): "a request has at most --max_queue texts",
    ("serve", "--root_path"): "let the proxy remove the path that it adds",
    ("serve", "--sessions_in_memory"): "sessions of a folder are read when they are used",
    ("recl", "--recl.split"): "the test text is read, or valid without one; --file gives another",
    ("recl", "--recl.window"): "a model without memory reads as much as in its training",
    ("score", "--separate_lines"): (
        "transformer_xl.inference.losses(model, texts, lengths) reads each text by itself"
    ),
    ("serve", "--save"): "each answer is saved before it ends; leave it out",
    ("serve", "--chat_template"): (
        "--template TEXT has the text of one message with {role} and {content}; templates in Jinja "
        "are programs, which the server does not run"
    ),
    **dict.fromkeys(
        (("serve", "--session_lease"), ("serve", "--session_snapshot")),
        "sessions are no longer in Redis: each server has a folder of its own, and a proxy sends "
        "a session to its server by the header X-Session, as docs/serving.md shows",
    ),
}
"""Options of the version before, by command, with what replaces them; "": the command itself."""
_LEAST_COLUMNS = 40
"""Columns in which the parser writes at least; in fewer than 6 it would never end."""
_OPTIONS = ("-h", "--help", "--version", "--tyro-print-completion", "--tyro-write-completion")
"""The options before a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return 0 (success), 1 (failure), 2 (usage error) or 130 (Ctrl-C)."""
    if argv is None:
        argv = sys.argv[1:]
        _open_closed()
        _write_anything()
        if shutil.get_terminal_size().columns < _LEAST_COLUMNS:
            os.environ["COLUMNS"] = str(_LEAST_COLUMNS)
    try:
        if [*argv] == ["--version"]:
            from transformer_xl import __version__

            print(__version__)
            code = 0
        else:
            command = _checked([*argv])
            if isinstance(command, int):
                code = command
            elif getattr(command, "any_size", False):
                from transformer_xl.model import any_size

                with any_size():
                    code = command.run() or 0
            else:
                code = command.run() or 0
        # At exit, a broken pipe or a full disk could no longer be reported.
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if (code := _explain(error)) is None:
            raise
    return code


def parse(argv: list[str]) -> Any:
    """Parse a command line to a command, whose ``run()`` returns the exit code, or None for 0.

    Raises:
        SystemExit: With 0 if help was requested, with 2 for a usage error.
        SettingsError: There is no such command.
    """
    # Imported late, so that Ctrl-C is handled from the start.
    import tyro

    from transformer_xl.cli.given import lists_of_numbers

    _require_current(argv)
    kinds = commands()
    options: Any = {"use_underscores": True, "config": (tyro.conf.FlagCreatePairsOff,)}
    # Lists of numbers may be divided by commas.
    options["registry"] = lists_of_numbers()
    # Parsed by itself, so that a message about an option does not list those of other commands.
    if argv and (kind := kinds.get(argv[0])) is not None:
        name, *rest = argv
        about = inspect.getdoc(kind)
        return tyro.cli(kind, prog=f"txl {name}", description=about, args=rest, **options)
    if argv and argv[0].partition("=")[0] not in _OPTIONS:
        nearest = near(argv[0], [*kinds, *_OPTIONS])
        hint = f"did you mean {nearest}?" if nearest else f"the commands are {', '.join(kinds)}"
        raise SettingsError(f"there is no command or option {argv[0]}: {hint}")
    choices = tuple(
        Annotated[kind, tyro.conf.subcommand(name, description=kind.__doc__.partition("\n")[0])]
        for name, kind in kinds.items()
    )
    choice: Any = Union[choices]  # noqa: UP007  (of a tuple)
    return tyro.cli(choice, prog="txl", description=_DESCRIPTION, args=argv, **options)


def _require_current(argv: list[str]) -> None:
    """Require no option that an earlier version had.

    Raises:
        SettingsError: It is gone; with what replaces it.
    """
    command = argv[0] if argv else ""
    options = (word.partition("=")[0].replace("-", "_") for word in argv[1:])
    for name in ("", *(option.replace("__", "--", 1) for option in options)):
        if replacement := _GONE.get((command, name)):
            raise SettingsError(f"{f'txl {command} {name}'.strip()} is gone: {replacement}")


def commands() -> dict[str, Any]:
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


def _checked(argv: list[str]) -> Any:
    """Parse and validate a command line; return an exit code if the parser has answered it."""
    try:
        command = parse(argv or ["--help"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        return code if argv else 2
    if (name := getattr(command, "dir", None)) is not None:
        from transformer_xl.cli.loading import require_model

        require_model(name)
    return command


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
