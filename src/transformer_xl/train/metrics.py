"""What a run reports while it trains: a log that survives a kill, and a display of the progress.

``metrics.jsonl`` holds one flat JSON object in a line::

    {"kind": "train", "step": 120, "bits_per_token": 2.3, "lr": 0.0025, "tokens_per_second": 10240}
    {"kind": "valid", "step": 120, "bits_per_token": 2.40, "nll": 1.66}

JSON has no word for numbers that are not finite, so these are written as the strings ``"NaN"``,
``"Infinity"`` and ``"-Infinity"``, and read back as numbers.
"""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, SupportsFloat

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from transformer_xl.config import replace_file
from transformer_xl.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor, nn

_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_LINE_SECONDS = 10.0
_REFRESH_SECONDS = 0.1


class MetricsLog:
    """Appends records to ``metrics.jsonl``.

    A context manager. Records after ``step``, from which the run goes on, are cut off, and so is a
    line that a killed process left unfinished.

    Raises:
        DataError: A line before the last one is damaged.
    """

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        if path.exists():
            lines = (line + b"\n" for line, its_step, _ in _lines(path) if its_step <= step)
            remaining = b"".join(lines)
            if remaining != path.read_bytes():
                replace_file(path, remaining)
        self._file = path.open("ab")

    def log(self, kind: str, step: int, **values: SupportsFloat) -> None:
        """Write one record; it is in the file when this returns."""
        record: dict[str, object] = {"kind": kind, "step": step}
        for name, value in values.items():
            x = value if isinstance(value, int) else float(value)
            record[name] = x if math.isfinite(x) else json.dumps(x)
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Mapping[str, object]]:
    """Read the records of a ``metrics.jsonl``, also while a run is writing it.

    A last line that is unfinished is left out.

    Raises:
        DataError: Another line is damaged.
    """
    return [record for _, _, record in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[bytes, int, Mapping[str, object]]]:
    lines = path.read_bytes().rstrip().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield (
                line,
                record["step"],
                {k: float(x) if x in _NOT_FINITE else x for k, x in record.items()},
            )
        elif line.strip() and number < len(lines):
            raise DataError(
                f"line {number} of {path} is not a record with a step: {line[:60]!r}; "
                "delete this line to go on without it"
            )


class Progress:
    """Shows on stderr how far a run is: a live bar on a terminal, now and then a line elsewhere.

    A context manager.

    Args:
        total_steps: The step at which the run ends.
        description: What is going on, in a word.
        quiet: Show nothing at all.
        passes: Show nothing of what is over soon, and leave nothing behind.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        description: str = "training",
        quiet: bool = False,
        passes: bool = False,
    ) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        # Rich calls a pipe a terminal when FORCE_COLOR is set, as many build servers do.
        # It is None where it was closed (2>&-).
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[state]}", markup=False),
            console=self._console,
            expand=True,
            auto_refresh=False,
            # Rich would swallow the results that go to stdout, also where that is a pipe.
            redirect_stdout=False,
            transient=passes,
            # The speed counts evaluations and checkpoints.
            speed_estimate_period=300,
            get_time=monotonic,
            disable=quiet or not is_terminal or self._console.is_dumb_terminal,
        )
        self._id = self._bar.add_task(description, total=total_steps, state="")
        self._task, self._measured = self._bar.tasks[0], ""
        self._passes, self._shown_at = passes, monotonic() if passes else -math.inf
        self._deadline = math.inf

    def __enter__(self) -> "Progress":
        # The first sample of the speed.
        self._bar.advance(self._id, 0)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Show no more of it; :meth:`say` still prints."""
        self._bar.stop()

    def expect(
        self, total_steps: int, first_step: int | None = None, *, seconds: float = math.inf
    ) -> None:
        """Correct the last step, where a resumed run begins, and when it ends at the latest."""
        self._deadline = monotonic() + seconds
        if first_step is not None:
            self._bar.reset(self._id, completed=first_step)
            self._bar.advance(self._id, 0)
        self._task.total = total_steps

    def update(
        self, step: int, bits: float | None = None, tokens_per_second: float | None = None
    ) -> None:
        """Set the step, and the loss in bits per token and the speed where they are new.

        Cheap, so that each step may call it: the display follows now and then.
        """
        task = self._task
        self._bar.update(self._id, completed=step)
        if tokens_per_second is not None:
            loss = "" if bits is None else f"{bits:.3f} bits/token  "
            self._measured = f"{loss}{tokens_per_second:,.0f} tokens/s"
        interval = _LINE_SECONDS if self._bar.disable else _REFRESH_SECONDS
        is_last = step == task.total and not self._passes
        if not is_last and monotonic() - self._shown_at < interval:
            return
        self._shown_at = monotonic()
        left = min(task.time_remaining or 0, max(self._deadline - self._shown_at, 0))
        left = f"{timedelta(seconds=round(left))} left" if left else ""
        state = "  ".join(filter(None, (f"{step:,}/{task.total:,}", self._measured, left)))
        if self._bar.disable:
            self.say(f"{task.description}  {state}")
        else:
            self._bar.update(self._id, state=state, refresh=True)

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    @classmethod
    @contextmanager
    def reading(
        cls, model: "nn.Module", n_tokens: int, description: str, *, quiet: bool = False
    ) -> Iterator[None]:
        """Show, within a ``with`` block, how far a model is with a text of so many tokens.

        Calls of the model with tokens to predict as the third argument are counted.
        """
        done, began = 0, monotonic()
        with cls(n_tokens, description=description, quiet=quiet, passes=True) as progress:

            def count(
                module: "nn.Module", arguments: "tuple[Tensor | None, ...]", _: object
            ) -> None:
                nonlocal done
                if len(arguments) >= 3 and (targets := arguments[2]) is not None:
                    # Parts that are read side by side overlap by a token if they are not equal.
                    done = min(done + targets.numel(), n_tokens)
                    progress.update(done, None, done / max(monotonic() - began, 1e-9))

            hook = model.register_forward_hook(count)
            try:
                yield
            finally:
                hook.remove()
