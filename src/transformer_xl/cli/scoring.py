"""The command score: log-probabilities of a text, streamed."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from heapq import heappush, heappushpop
from io import UnsupportedOperation
from pathlib import Path
from select import select
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from transformer_xl.cli.given import ReadsModel
from transformer_xl.cli.loading import (
    is_within,
    load_with_state,
    name_of,
    named,
    require_readable,
    saved_at_end,
    say_changes,
)
from transformer_xl.cli.printing import exclude, say, show
from transformer_xl.config import recipe_of, require

if TYPE_CHECKING:
    from transformer_xl.data import Vocab
    from transformer_xl.inference.evaluate import Flow, Piece, Scored

_BLOCK = 1 << 16
_IDLE_SECONDS = 0.02
_WARNINGS = 5
_RAW_REMEDY = "--raw reads every byte as it is"


@dataclass(kw_only=True)
class Score(ReadsModel):
    """Compute the log-probability (in nats) of every token of a text.

    Prints one JSON object per line as soon as a token is scored. A pipe is scored as a stream, in
    constant memory, with the same numbers as the whole text up to rounding. With --by line, each
    line is tokenized separately and scored with its mean and sum; a line above 65,536 bytes is
    scored in parts. Text outside the vocabulary is read as <unk> if there is one, else skipped,
    with a warning, and counted as unknown. CR LF and CR are read as LF, and a byte-order mark is
    left out.

    A line is read behind those before it, also with --mem_len 0, as the lines of a segment see each
    other. With --separate_lines it is a text of its own: for sentences or records that have nothing
    to do with each other.

    Examples:
      txl score runs/demo notes.txt
      cat notes.txt | txl score runs/demo -
      tail -F app.log | txl score runs/demo - --by line --state app.state
      txl score runs/demo notes.txt --by line --json
      txl score runs/log today.log --by line --top 10
      txl score runs/demo sentences.txt --by line --separate_lines
    """

    file: Annotated[Path, tyro.conf.Positional]
    """The text; - reads the standard input."""
    by: Literal["token", "line"] = "token"
    """One JSON object per token, or per line with the mean (nll) and the sum (nll_sum) of its
    -log p in nats, and the means in bits."""
    separate_lines: bool = False
    """With --by line: each line is a text of its own, so its scores do not depend on other lines;
    the first token of a line has none. Many lines are read at once."""
    top: int | None = None
    """With --by line: print so many lines only, those with the largest nll_sum, at the end. They
    are the odd ones of a log if the model was trained on a log without them."""
    raw: bool = False
    """Read every byte as it is, as is done for a run with data.raw: no line end is normalized."""
    mem_len: int | None = None
    """Memory length; None: as configured in the model."""
    segment_len: int = 128
    """Tokens read at once, fewer while a pipe is waiting for more."""
    state: Path | None = None
    """Resume from the memory in this file if it exists, and save the memory there at the end."""
    json: bool = False
    """Print one JSON object at the end: sums; by token also all ids and log_probs, held in RAM."""

    def run(self) -> None:
        """Score and print."""
        require_readable(self.file)
        require(self.segment_len >= 1, f"segment_len={self.segment_len} must be at least 1")
        mem_len = self.mem_len
        require(mem_len is None or mem_len >= 0, f"mem_len={mem_len} must be at least 0")
        require(self.top is None or self.top >= 1, f"top={self.top} must be at least 1")
        for name in ("separate_lines", "top"):
            has_effect = self.by == "line" or not getattr(self, name)
            require(has_effect, f"--{name} has no effect by token: give --by line, too")
        # Sums, and no lines.
        exclude(json=self.json, top=self.top)
        # A state goes on from what was read before, as no separate line does.
        exclude(state=self.state, separate_lines=self.separate_lines)
        recipe = recipe_of(self.dir)
        is_raw = self.raw or (recipe is not None and recipe.data.raw)
        if self.by == "line" and recipe is not None and is_within(self.file, recipe.data.path):
            say(
                f"warning: {self.dir} was trained on {self.file}: what it learned by heart is not "
                "surprising, odd lines included; score a text that it was not trained on"
            )
        # Slow imports come after all checks of the arguments.
        from transformer_xl.data import Normalizer, normalized
        from transformer_xl.inference.evaluate import Flow, LineFlow
        from transformer_xl.inference.generate import State, write_state
        from transformer_xl.model import Lengths, Reader, ReaderState, require_mem_len

        model, vocab, state, checksum = load_with_state(self.dir, self.weights, self.state)
        require_mem_len(model, self.mem_len)
        lengths = Lengths.of(model.config, segment_len=self.segment_len, mem_len=self.mem_len)
        begun = state and ReaderState(state.mems, state.last_token, state.offset)
        reader = Reader(model, lengths, begun)

        def save() -> None:
            mems, last_token, offset = reader.state
            if self.state and last_token is not None:
                random = None if state is None else state.random
                last = State(mems, last_token, random, offset)
                write_state(self.state, last, checksum, positions=reader.most_positions)
                say(f"saved the memory to {self.state}; the same command resumes from it")

        # The signals first: a named pipe that nobody has opened yet is waited for.
        with saved_at_end(save), _opened(self.file, is_raw=is_raw) as file:
            blocks = _blocks(file, self.file)
            normalizer = Normalizer(name_of(self.file), _RAW_REMEDY)
            if not is_raw:
                blocks = normalized(blocks, normalizer)
            try:
                has_tokens, n_unknown = self._show(
                    LineFlow(reader) if self.separate_lines else Flow(reader), blocks, vocab
                )
            finally:
                say_changes(name_of(self.file), normalizer.changes, _RAW_REMEDY)
            if not has_tokens:
                empty = "the text has 0 tokens"
                why = "no part of the text is in the vocabulary" if n_unknown else empty
                say(f"no token was scored: {why}")

    def _show(self, flow: "Flow", blocks: Iterable[bytes], vocab: "Vocab") -> tuple[bool, int]:
        """Print scores as they come, and the sums even if reading fails.

        Returns:
            Whether there was a token, and the number of unknown symbols.
        """
        from transformer_xl.inference.evaluate import Cutter, LineSums, Sums

        unknown, lines, total = _Unknown(vocab), LineSums(vocab), Sums()
        ids: list[int] = []
        log_probs: list[float | None] = []
        has_tokens = False
        # A heap, by sum; of lines with equal sums the later one is the smaller.
        most: list[tuple[float, int, dict[str, Any]]] = []

        def see(piece: "Piece") -> None:
            unknown.see(piece)
            if self.by == "line":
                lines.push(piece)

        def tokens(scored: "Iterable[Scored]") -> Iterator[dict[str, Any]]:
            for token, log_prob in scored:
                total.add(log_prob, 0)
                if self.json:
                    ids.append(token)
                    log_probs.append(log_prob)
                else:
                    yield {"id": token, "text": vocab.decode([token]), "log_prob": log_prob}

        records = lines.add if self.by == "line" else tokens
        try:
            for scored in flow.scores(blocks, Cutter(vocab, self.by), see):
                has_tokens |= bool(scored)
                for record in records(scored):
                    if self.top:
                        add = heappush if len(most) < self.top else heappushpop
                        add(most, (record["nll_sum"], -lines.n_lines, record))
                    elif not self.json:
                        show(record, as_json=True)
                sys.stdout.flush()
        finally:
            unknown.print_total()
            for _, _, record in sorted(most, reverse=True):
                show(record, as_json=True)
            if self.json and self.by == "line":
                figures = {"lines": lines.n_lines, **lines.total.figures(), "unknown": unknown.n}
                show(figures, as_json=True)
            elif self.json:
                figures = {"tokens": total.n_predicted, "nll": total.nll, "nll_sum": total.nll_sum}
                about = {"unknown": unknown.n, "ids": ids, "log_probs": log_probs}
                show(figures | about, as_json=True)
        return has_tokens, unknown.n


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
        from transformer_xl.data import describe_unknown, treated

        counts = treated(self._vocab, piece.unknown)
        self._treated += counts
        self.n += piece.unknown.total()
        self._places += 1
        if self._places <= _WARNINGS:
            what = describe_unknown(piece.unknown, piece.line)
            say(f"warning: not in the vocabulary: {what}; {_describe_treatment(counts)}")
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


@contextmanager
def _opened(path: Path, *, is_raw: bool) -> Iterator[Any]:
    """Open a file, decompressing it as the end of its name says, unless it ``is_raw``."""
    from transformer_xl.data import opened

    with ExitStack() as stack:
        with named(path):
            if str(path) == "-":
                file: Any = sys.stdin.buffer
            else:
                file = stack.enter_context(path.open("rb") if is_raw else opened(path))
        yield file


def _blocks(file: Any, path: Path) -> Iterator[bytes]:
    """Yield a text in blocks as they arrive; an empty block: no more has arrived yet."""
    # When an incomplete segment is scored, too; None: nothing is pending.
    deadline: float | None = None
    with named(path, " to its end"):
        while True:
            left = None if deadline is None else max(deadline - monotonic(), 0.0)
            if not _is_ready(file, left):
                deadline = None
                yield b""
            elif block := file.read1(_BLOCK):
                deadline = deadline or monotonic() + _IDLE_SECONDS
                yield block
            else:
                return


def _is_ready(file: Any, seconds: float | None) -> bool:
    """Wait until a file can be read, as a regular file always can; None: without end."""
    try:
        return bool(select([file], [], [], seconds)[0])
    except UnsupportedOperation:
        # A file in memory.
        return True
