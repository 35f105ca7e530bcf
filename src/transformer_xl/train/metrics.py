"""What a run reports while it trains: a log that survives a kill, and a display of the progress.

``metrics.jsonl`` holds one flat JSON object in a line::

    {"kind": "train", "step": 120, "bits_per_token": 2.3, "lr": 0.0025, "tokens_per_second": 10240}
    {"kind": "valid", "step": 120, "bits_per_token": 2.40, "nll": 1.66}

JSON has no word for numbers that are not finite, so these are written as the strings ``"NaN"``,
``"Infinity"`` and ``"-Infinity"``, and read back as numbers.
"""

import json
import logging
import math
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, SupportsFloat

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from transformer_xl.config.files import replace_file

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.tensorboard import SummaryWriter

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LINE_SECONDS = 10.0
_REFRESH_SECONDS = 0.1
_PRESENT_SECONDS = 60.0
# Columns of a terminal below which the numbers leave no room for a bar.
_BAR_WIDTH = 72


class MetricsLog:
    """Appends records to ``metrics.jsonl`` and mirrors their numbers to TensorBoard.

    TensorBoard gets them in ``folder/tensorboard`` where its package is installed; nothing is
    missing from the JSON lines where it is not.

    Args:
        folder: The run folder; made when it does not exist.
        step: The step the run goes on from. Later records of an earlier session are cut off, and
            so is a line that a killed process left unfinished. 0: a new run.

    Raises:
        ValueError: A line before the last one is damaged.
    """

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        resumes = path.exists()
        if resumes:
            _cut(path, step)
        self._file = path.open("ab")
        self._tensorboard = _tensorboard(folder / "tensorboard", step + 1 if resumes else None)

    def log(self, kind: str, step: int, **values: SupportsFloat | str | None) -> None:
        """Write one record; it is in the file when this returns.

        Args:
            kind: What was measured: "train", "valid" or another name.
            step: The step after which it was measured.
            values: Numbers, or anything ``float`` takes; text and None go to the JSON lines only.
        """
        plain = {
            name: value if value is None or isinstance(value, int | str) else float(value)
            for name, value in values.items()
        }
        record = {"kind": kind, "step": step}
        record |= {name: _spelled(value) for name, value in plain.items()}
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()
        if self._tensorboard:
            for name, value in plain.items():
                if isinstance(value, int | float):
                    self._tensorboard.add_scalar(f"{kind}/{name}", value, step)

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a ``metrics.jsonl``, also while a run is writing it.

    A last line that is unfinished is left out.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line before the last one is damaged.
    """
    return [record for _, record in _lines(path)]


def _spelled(value: float | str | None) -> float | str | None:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    lines = path.read_bytes().rstrip().split(b"\n")
    for number, line in enumerate(lines, start=1):
        record = _parsed(line)
        if record is not None:
            yield line, record
        elif line.strip() and number < len(lines):
            raise ValueError(
                f"line {number} of {path} is not a record with a step: {line[:60]!r}; "
                "delete this line to go on without it"
            )


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {
        name: _NOT_FINITE.get(value, value) if isinstance(value, str) else value
        for name, value in record.items()
    }


def _cut(path: Path, step: int) -> None:
    kept = b"".join(line + b"\n" for line, record in _lines(path) if record["step"] <= step)
    if kept != path.read_bytes():
        replace_file(path, kept)


def _tensorboard(folder: Path, purge_step: int | None) -> "SummaryWriter | None":
    if find_spec("tensorboard") is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    # An old tensorboard beside a new numpy or protobuf fails on import in all of these ways.
    except (ImportError, AttributeError, TypeError) as error:
        logging.getLogger(__name__).warning("TensorBoard is installed but broken: %s", error)
        return None
    return SummaryWriter(str(folder), purge_step=purge_step)


class Progress:
    """Shows on stderr how far a run is: a live bar on a terminal, now and then a line elsewhere.

    Use it as a context manager.

    Args:
        total_steps: The step at which the run ends.
        step: The step it goes on from.
        description: What is going on, in a word.
        quiet: Show nothing at all.
        passes: Show nothing of what is over soon, and leave nothing behind.
    """

    def __init__(
        self,
        total_steps: int,
        step: int = 0,
        *,
        description: str = "training",
        quiet: bool = False,
        passes: bool = False,
    ) -> None:
        self._total = total_steps
        self._description = description
        self._console = Console(stderr=True, quiet=quiet)
        # Rich calls a pipe a terminal when FORCE_COLOR is set, as many build servers do.
        live = sys.stderr.isatty() and not self._console.is_dumb_terminal and not quiet
        self._passes = passes
        self._shown_at = monotonic() if passes else -math.inf
        # Of the present speed: steps done, and when. It counts evaluations and checkpoints too.
        self._marks: deque[tuple[float, int]] = deque([(monotonic(), step)])
        # When it ends at the latest, whatever steps are left.
        self._deadline = math.inf
        self._latest: dict[str, Any] = {
            "steps": self._steps(step),
            "bits": "",
            "speed": "",
            "left": "",
        }
        self._waiting: str | None = None
        self._bar = self._new_bar() if live else None

    def _new_bar(self) -> Bar:
        drawn = [TextColumn("{task.description}", markup=False), BarColumn(bar_width=None)]
        bar = Bar(
            *(drawn if self._console.width >= _BAR_WIDTH else []),
            *(
                TextColumn(f"{{task.fields[{name}]}}")
                for name in ("steps", "bits", "speed", "left")
            ),
            console=self._console,
            expand=True,
            auto_refresh=False,
            # Rich would swallow the results that go to stdout, also where that is a pipe.
            redirect_stdout=False,
            transient=self._passes,
        )
        bar.add_task(
            self._description,
            total=self._total,
            completed=self._marks[0][1],
            **self._latest,
        )
        return bar

    def __enter__(self) -> "Progress":
        self._marks[0] = monotonic(), self._marks[0][1]
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Show no more of it; what is said is still printed."""
        if self._bar:
            self._bar.stop()
        elif self._waiting and not self._passes:
            self.say(self._waiting)
        self._waiting = None

    def expect(
        self, total_steps: int, first_step: int | None = None, *, seconds: float = math.inf
    ) -> None:
        """Correct what is expected.

        Args:
            total_steps: The last step.
            first_step: Where a resumed run begins.
            seconds: The time that is left, where a limit may end the run before its last step; one
                that is over ends nothing any more.
        """
        self._total = total_steps
        self._deadline = monotonic() + seconds if seconds > 0 else math.inf
        if first_step is not None:
            self._marks = deque([(monotonic(), first_step)])
        if self._bar:
            self._bar.update(self._bar.task_ids[0], total=total_steps, completed=first_step)

    def update(
        self, step: int, bits: float | None = None, tokens_per_second: float | None = None
    ) -> None:
        """Show a new state; cheap, so that each step may call it.

        Args:
            step: Steps done.
            bits: Training loss in bits per token; None: as it was.
            tokens_per_second: Speed; None: as it was.
        """
        now = monotonic()
        fields = self._latest
        fields |= {"steps": self._steps(step), "left": self._left(step, now)}
        if bits is not None:
            fields["bits"] = f"{bits:.3f} bits/token"
        if tokens_per_second is not None:
            fields["speed"] = f"{tokens_per_second:,.0f} tokens/s"
        due = step >= self._total and not self._passes
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=step, **fields)
            if due or now - self._shown_at >= _REFRESH_SECONDS:
                self._bar.refresh()
                self._shown_at = now
            return
        self._waiting = f"{self._description}  " + "  ".join(filter(None, fields.values()))
        if due or now - self._shown_at >= _LINE_SECONDS:
            self.say(self._waiting)
            self._waiting = None
            self._shown_at = now

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _steps(self, step: int) -> str:
        return f"{step:,}/{self._total:,}"

    def _left(self, step: int, now: float) -> str:
        """Say how long what is left takes at the speed of the last minute."""
        marks = self._marks
        if step > marks[-1][1]:
            marks.append((now, step))
        while len(marks) > 2 and now - marks[1][0] >= _PRESENT_SECONDS:
            marks.popleft()
        began, first_step = marks[0]
        if not first_step < step < self._total:
            return ""
        step_seconds = (now - began) / (step - first_step)
        seconds = min(step_seconds * (self._total - step), max(self._deadline - now, 0))
        return f"{timedelta(seconds=round(seconds))} left"


@contextmanager
def reading(
    model: "nn.Module", n_tokens: int, description: str, *, quiet: bool = False
) -> Iterator[None]:
    """Show, within a ``with`` block, how far a model is with a text.

    Args:
        model: The model; calls with the tokens to predict as the third argument are counted.
        n_tokens: How many of them there are.
        description: What it reads the text for, in a few words.
        quiet: Show nothing at all.
    """
    done, began = 0, monotonic()
    with Progress(n_tokens, description=description, quiet=quiet, passes=True) as progress:

        def count(module: "nn.Module", given: tuple[Any, ...], out: object) -> None:
            nonlocal done
            if len(given) < 3 or given[2] is None:
                # Read, and nothing predicted.
                return
            # Parts that are read side by side overlap by a token where they cannot be equal.
            done = min(done + given[2].numel(), n_tokens)
            speed = done / max(monotonic() - began, 1e-9)
            progress.update(done, tokens_per_second=speed)

        hook = model.register_forward_hook(count)
        try:
            yield
        finally:
            hook.remove()
