"""The command score: log-probabilities of a text, streamed."""

import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from io import UnsupportedOperation
from os import fstat, read
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from transformer_xl.cli.given import Folder
from transformer_xl.cli.loading import Weights, ended_by_signals, load, require_text
from transformer_xl.cli.printing import say, show

if TYPE_CHECKING:
    from torch import Tensor

    from transformer_xl.data import Vocab
    from transformer_xl.inference.evaluate.flow import Cutter, Flow, Piece
    from transformer_xl.model.reading import Reader

_BLOCK = 1 << 16
_IDLE_SECONDS = 0.02
_WARNINGS = 5


@dataclass(kw_only=True)
class Score:
    """Compute the log-probability (in nats) of every token of a text.

    Prints one JSON object per line as soon as a token is scored. A pipe is scored as a stream, in
    constant memory, with the same numbers as the whole text up to rounding. With --by line, each
    line is tokenized separately and scored with its mean and sum; a line above 65,536 bytes is
    scored in parts. Text outside the vocabulary is read as <unk> if there is one, else skipped,
    with a warning, and counted as unknown.
    """

    examples: ClassVar = (
        "txl score runs/demo notes.txt",
        "cat notes.txt | txl score runs/demo -",
        "tail -F app.log | txl score runs/demo - --by line --state app.state",
        "txl score runs/demo notes.txt --by line --json",
    )

    dir: Folder
    """A model folder or run folder."""
    file: Annotated[Path, tyro.conf.Positional]
    """The text; - reads the standard input."""
    by: Literal["token", "line"] = "token"
    """One JSON object per token, or per line with the mean (nll) and the sum (nll_sum) of its
    -log p in nats, and the means in bits."""
    mem_len: int | None = None
    """Memory length; None: as configured in the model."""
    segment_len: int = 128
    """Tokens read at once, fewer while a pipe is waiting for more."""
    weights: Weights = "float32"
    """Precision of the weights."""
    state: Path | None = None
    """Resume from the memory in this file if it exists, and save the memory there at the end."""
    json: bool = False
    """Print one JSON object at the end: sums; by token also all ids and log_probs, held in RAM."""

    def run(self) -> None:
        """Score and print."""
        require_text(self.file)
        for name, value, least in (
            ("segment_len", self.segment_len, 1),
            ("mem_len", self.mem_len, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        # Slow imports come after all checks of the arguments.
        from transformer_xl.config.device import pick_device
        from transformer_xl.inference.evaluate.flow import Cutter, Flow
        from transformer_xl.model.lengths import Lengths
        from transformer_xl.model.limits import require_mem_len
        from transformer_xl.model.pretrained import (
            find_model_folder,
            weights_checksum,
            weights_path,
        )
        from transformer_xl.model.reading import Reader

        weights, loaded = weights_path(find_model_folder(self.dir)), ""
        if self.state:
            # Before the weights are read: a running training may replace them later.
            loaded = weights_checksum(weights)
        model, vocab = load(self.dir, pick_device(), self.weights)
        state, random = None, None
        if self.state and self.state.exists():
            from transformer_xl.inference.generate import load_state
            from transformer_xl.model.reading import ReaderState

            found = load_state(self.state, weights, model)
            state, random = ReaderState(found.mems, found.last_token, found.offset), found.random
        require_mem_len(model, self.mem_len)
        lengths = Lengths.of(model.config, segment_len=self.segment_len, mem_len=self.mem_len)
        reader = Reader(model, lengths, state)
        unknown = _Unknown(vocab)
        with ended_by_signals(), _opened(self.file) as file:
            try:
                show_all = self._show_lines if self.by == "line" else self._show_tokens
                blocks = _blocks(file, self.file)
                show_all(blocks, Cutter(vocab, self.by), Flow(reader), vocab, unknown)
                if reader.state.last_token is None:
                    why = (
                        "no part of the text is in the vocabulary"
                        if unknown.n
                        else "the text has 0 tokens"
                    )
                    say(f"no token was scored: {why}")
            finally:
                if self.state:
                    self._save(self.state, reader, random, loaded)

    def _save(self, path: Path, reader: "Reader", random: "Tensor | None", weights: str) -> None:
        from transformer_xl.inference.generate import State, write_state

        mems, last_token, offset = reader.state
        if last_token is None:
            return
        state = State(mems, last_token, random, offset)
        write_state(path, state, weights, positions=reader.most_positions)
        say(f"saved the memory to {path}; the same command resumes from it")

    def _show_tokens(
        self,
        blocks: Iterable[bytes],
        cutter: "Cutter",
        flow: "Flow",
        vocab: "Vocab",
        unknown: "_Unknown",
    ) -> None:
        from transformer_xl.inference.evaluate.flow import Sums

        ids: list[int] = []
        found: list[float | None] = []
        total = Sums()
        try:
            for scored in flow.scores(blocks, cutter, unknown.see):
                for token, log_prob in scored:
                    total.add(log_prob, 0)
                    if self.json:
                        ids.append(token)
                        found.append(log_prob)
                    else:
                        text = vocab.decode([token])
                        show({"id": token, "text": text, "log_prob": log_prob}, as_json=True)
                sys.stdout.flush()
        finally:
            # For what was scored, even if the rest could not be read.
            unknown.print_total()
            if self.json:
                figures = {"tokens": total.n_predicted, "nll": total.nll, "nll_sum": total.nll_sum}
                about = {"unknown": unknown.n, "ids": ids, "log_probs": found}
                show(figures | about, as_json=True)

    def _show_lines(
        self,
        blocks: Iterable[bytes],
        cutter: "Cutter",
        flow: "Flow",
        vocab: "Vocab",
        unknown: "_Unknown",
    ) -> None:
        from transformer_xl.inference.evaluate.flow import LineSums

        lines = LineSums(vocab)

        def see(piece: "Piece") -> None:
            lines.push(piece)
            unknown.see(piece)

        try:
            for scored in flow.scores(blocks, cutter, see):
                for line in lines.add(scored):
                    if not self.json:
                        show(line, as_json=True)
                sys.stdout.flush()
        finally:
            unknown.print_total()
            if self.json:
                figures = {"lines": lines.n_lines, **lines.total.figures(), "unknown": unknown.n}
                show(figures, as_json=True)


class _Unknown:
    """Counts characters and words outside the vocabulary, and warns of the first few."""

    def __init__(self, vocab: "Vocab") -> None:
        self._vocab = vocab
        self._treated: Counter[str] = Counter()
        self.n = self._places = 0

    def see(self, piece: "Piece") -> None:
        """Count the unknown symbols of a piece of the text."""
        if not piece.unknown:
            return
        from transformer_xl.data.vocab import describe_unknown, treated

        found = treated(self._vocab, piece.unknown)
        self._treated += found
        self.n += piece.unknown.total()
        self._places += 1
        if self._places <= _WARNINGS:
            what = describe_unknown(piece.unknown, piece.line)
            say(f"warning: not in the vocabulary: {what}; {_describe_treatment(found)}")
        elif self._places == _WARNINGS + 1:
            say("warning: further warnings are suppressed; the total follows at the end")

    def print_total(self) -> None:
        """Print the total, if warnings were suppressed."""
        if self._places > _WARNINGS:
            how = _describe_treatment(self._treated)
            say(f"warning: {self.n:,} in all not in the vocabulary; {how}")


def _describe_treatment(treated: Counter[str]) -> str:
    """Describe how unknown symbols were treated, with counts if in different ways."""
    if len(treated) == 1:
        return next(iter(treated))
    return ", ".join(f"{n:,} {how}" for how, n in sorted(treated.items(), reverse=True))


def _opened(path: Path) -> AbstractContextManager[Any]:
    try:
        return nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb")
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}") from error


def _blocks(file: Any, path: Path) -> Iterator[bytes]:
    """Yield a text in blocks as they arrive; an empty block: no more has arrived yet."""
    try:
        descriptor = file.fileno()
        is_waited_for = not stat.S_ISREG(fstat(descriptor).st_mode)
    except UnsupportedOperation:
        descriptor, is_waited_for = -1, False
    try:
        if is_waited_for:
            # Not through the file object: a blocked read holds its lock, also at exit.
            yield from _blocks_by_thread(lambda: read(descriptor, _BLOCK))
        while block := b"" if is_waited_for else file.read(_BLOCK):
            yield block
    except OSError as error:
        name = "the standard input" if str(path) == "-" else path
        raise OSError(f"cannot read {name} to its end: {error.strerror}") from error


def _blocks_by_thread(read_block: Callable[[], bytes]) -> Iterator[bytes]:
    """Read in a thread; yield an empty block when no more arrives for a moment."""
    # Short, so that a fast writer is slowed down by the pipe.
    blocks: Queue[bytes | OSError] = Queue(maxsize=4)

    def fill() -> None:
        try:
            while block := read_block():
                blocks.put(block)
            blocks.put(b"")
        except OSError as error:
            blocks.put(error)

    Thread(target=fill, daemon=True).start()
    # When an incomplete segment is scored, too; None: nothing is pending.
    deadline: float | None = None
    while True:
        try:
            left = None if deadline is None else max(deadline - monotonic(), 0.0)
            block = blocks.get(timeout=left)
        except Empty:
            deadline = None
            yield b""
            continue
        if isinstance(block, OSError):
            raise block
        if not block:
            return
        deadline = deadline or monotonic() + _IDLE_SECONDS
        yield block
