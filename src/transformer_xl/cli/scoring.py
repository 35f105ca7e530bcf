"""The command score: log-probabilities of a text, streamed."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
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
    name_in_errors,
    name_of,
    require_readable,
    save_at_end,
    say_changes,
)
from transformer_xl.cli.printing import exclude, say, show
from transformer_xl.config import recipe_of, require

if TYPE_CHECKING:
    from transformer_xl.cli.flow import Scored
    from transformer_xl.data import Vocab

_BLOCK = 1 << 16
_IDLE_SECONDS = 0.02
_RAW_REMEDY = "--raw reads every byte as it is"


@dataclass(kw_only=True)
class Score(ReadsModel):
    """Compute the log-probability (in nats) of every token of a text.

    Prints one JSON object per line as soon as a token is scored. A pipe is scored as a stream, in
    constant memory, with the same numbers as the whole text up to rounding. With --by line, each
    line is tokenized separately and scored with its mean and sum; a line above 65,536 characters
    is scored in parts. Text outside the vocabulary is read as <unk> if there is one, else skipped,
    with a warning, and counted as unknown. CR LF and CR are read as LF, and a byte-order mark is
    left out.

    A line is read behind those before it, also with --mem_len 0, as the lines of a segment see each
    other.

    Examples:
      txl score runs/demo notes.txt
      cat notes.txt | txl score runs/demo -
      tail -F app.log | txl score runs/demo - --by line --state app.state
      txl score runs/demo notes.txt --by line --json
      txl score runs/log today.log --by line --top 10
    """

    file: Annotated[Path, tyro.conf.Positional]
    """The text; - reads the standard input."""
    by: Literal["token", "line"] = "token"
    """One JSON object per token, or per line with the mean (nll) and the sum (nll_sum) of its
    -log p in nats, and the means in bits."""
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
        """Print the surprise of each token or line of the file; save the memory if asked for."""
        require_readable(self.file)
        require(self.top is None or self.top >= 1, f"top={self.top} must be at least 1")
        require(self.by == "line" or not self.top, "--top has no effect by token: give --by line")
        exclude(json=self.json, top=self.top)
        recipe = recipe_of(self.dir)
        is_raw = self.raw or bool(recipe and recipe.data.raw)
        if self.by == "line" and recipe is not None and is_within(self.file, recipe.data.path):
            say(
                f"warning: {self.dir} was trained on {self.file}: what it learned by heart is not "
                "surprising, odd lines included; score a text that it was not trained on"
            )
        # Slow imports come after all checks of the arguments.
        import numpy as np

        from transformer_xl.cli.flow import pieces_of, scores
        from transformer_xl.data import Normalizer
        from transformer_xl.inference.generate import State
        from transformer_xl.model import Lengths, Reader, ReaderState

        model, vocab, state, checksum = load_with_state(self.dir, self.weights, self.state)
        model.require_mem_len(self.mem_len)
        lengths = Lengths.of(model.config, segment_len=self.segment_len, mem_len=self.mem_len)
        earlier = state and ReaderState(state.mems, state.last_token, state.offset)
        reader = Reader(model, lengths, earlier)

        def save() -> None:
            mems, last_token, offset = reader.state
            if self.state and last_token is not None:
                random = None if state is None else state.random
                tokens = np.array([last_token])
                last = State(source=mems, tokens=tokens, random=random, offset=offset)
                last.save(self.state, checksum, positions=reader.most_positions)
                say(f"saved the state to {self.state}; the same command resumes from it")

        failures: list[OSError] = []
        # The signals first: a named pipe that nobody has opened yet is waited for.
        with save_at_end(save):
            normalizer = Normalizer(name_of(self.file), _RAW_REMEDY)
            blocks = _blocks(self.file, failures, is_raw=is_raw)
            blocks = blocks if is_raw else normalizer.blocks(blocks)
            try:
                self._show(vocab, scores(reader, pieces_of(vocab, blocks, self.by)))
            finally:
                say_changes(name_of(self.file), normalizer.changes, _RAW_REMEDY)
            if failures:
                raise failures[0]

    def _show(self, vocab: "Vocab", scored: "Iterator[Scored]") -> None:
        """Print scores as they come, and the sums even if reading is interrupted."""
        from transformer_xl.cli.flow import Sums

        total, n_lines, unknown, n_warned = Sums(), 0, Counter[str](), 0
        ids: list[int] = []
        log_probs: list[float | None] = []
        # A heap, by sum; of lines with equal sums the later one is the smaller.
        most: list[tuple[float, int, dict[str, Any]]] = []
        try:
            for piece, of_tokens in scored:
                if piece.unknown:
                    treatment = vocab.count_by_treatment(piece.unknown)
                    if not unknown:
                        n_warned = treatment.total()
                        line = piece.line + vocab.first_unknown_line(piece.text) - 1
                        what = vocab.describe_unknown(piece.unknown, line)
                        say(f"warning: not in the vocabulary: {what}; {_described(treatment)}")
                    unknown += treatment
                sums = Sums.of(vocab, piece, of_tokens)
                total, n_lines = total + sums, n_lines + 1
                if self.by == "line":
                    # JSON cannot hold invalid UTF-8.
                    text = piece.text.removesuffix("\n").encode("utf-8", "surrogateescape")
                    record = {"line": piece.line, "text": text.decode("utf-8", "replace")}
                    record |= {**sums.figures(), "unknown": piece.unknown.total()}
                    if self.top:
                        add = heappush if len(most) < self.top else heappushpop
                        add(most, (sums.nll_sum, -n_lines, record))
                    elif not self.json:
                        show(record, as_json=True)
                elif self.json:
                    ids += piece.ids
                    log_probs += of_tokens
                else:
                    for token, log_prob in zip(piece.ids, of_tokens, strict=True):
                        record = {"id": token, "text": vocab.decode([token]), "log_prob": log_prob}
                        show(record, as_json=True)
                sys.stdout.flush()
        finally:
            if (n_unknown := unknown.total()) > n_warned:
                say(f"warning: {n_unknown:,} in all not in the vocabulary; {_described(unknown)}")
            for _, _, record in sorted(most, reverse=True):
                show(record, as_json=True)
            if self.json and self.by == "line":
                figures = {"lines": n_lines, **total.figures(), "unknown": n_unknown}
                show(figures, as_json=True)
            elif self.json:
                figures = {name: total.figures()[name] for name in ("tokens", "nll", "nll_sum")}
                about = {"unknown": n_unknown, "ids": ids, "log_probs": log_probs}
                show(figures | about, as_json=True)
        if not total.n_tokens:
            empty = "the text has 0 tokens"
            why = "no part of the text is in the vocabulary" if n_unknown else empty
            say(f"no token was scored: {why}")


def _described(treatment: Counter[str]) -> str:
    """Describe how unknown symbols were treated, with counts if in different ways."""
    if len(treatment) == 1:
        return next(iter(treatment))
    return ", ".join(f"{n:,} {how}" for how, n in sorted(treatment.items(), reverse=True))


def _blocks(path: Path, failures: list[OSError], *, is_raw: bool) -> Iterator[bytes]:
    """Yield a text in blocks as they arrive; an empty block: no more has arrived yet.

    Args:
        path: The text, decompressed as the end of its name says, unless it ``is_raw``.
        failures: Is given the failure of a read, after which the text ends.
        is_raw: Whether bytes are read as they are.
    """
    from transformer_xl.data import opened

    with ExitStack() as stack:
        with name_in_errors(path):
            if str(path) == "-":
                file: Any = sys.stdin.buffer
            else:
                file = stack.enter_context(path.open("rb") if is_raw else opened(path))
        # When an incomplete segment is scored, too; None: nothing is pending.
        deadline: float | None = None
        try:
            with name_in_errors(path, " to its end"):
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
        except OSError as error:
            failures.append(error)


def _is_ready(file: Any, seconds: float | None) -> bool:
    """Wait until a file can be read, as a regular file always can; None: without end."""
    try:
        return bool(select([file], [], [], seconds)[0])
    except UnsupportedOperation:
        # A file in memory.
        return True
