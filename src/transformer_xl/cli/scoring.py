"""The command that scores a text as it flows: score."""

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
    """Say how surprising a text is to a model: the log-probability (in nats) of every token.

    One JSON object a line, as soon as it is known. A pipe is scored as it flows, in constant
    memory, for as long as it runs, and with the numbers of the whole text up to rounding.
    By line, each line is cut into tokens by itself and comes with its mean and its sum; one above
    65,536 bytes comes in parts. What the vocabulary has no symbol for is left out or, where it has
    an <unk>, read as that, with a warning, and counted as unknown.
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
    """What each JSON object is about: a token, or a line, with the mean (nll) and the sum (nll_sum)
    of its -log p in nats, and means in bits."""
    mem_len: int | None = None
    """Remembered positions; None: as the model was trained."""
    segment_len: int = 128
    """Tokens read at once, if as many have arrived."""
    weights: Weights = "float32"
    """Precision of the weights."""
    state: Path | None = None
    """Go on from the memory in this file if it exists, and save the memory there at the end."""
    json: bool = False
    """Print one JSON object at the end: sums; by token also all ids and log_probs, kept so long."""

    def run(self) -> None:
        """Score and print."""
        require_text(self.file)
        for name, value, least in (
            ("segment_len", self.segment_len, 1),
            ("mem_len", self.mem_len, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        # What takes a while comes when nothing is left to refuse.
        from transformer_xl.config.device import pick_device
        from transformer_xl.inference.evaluate.flow import Cutter, Flow
        from transformer_xl.model.lengths import Lengths
        from transformer_xl.model.needs import require_mem_len
        from transformer_xl.model.pretrained import (
            find_model_folder,
            weights_checksum,
            weights_path,
        )
        from transformer_xl.model.reading import Reader

        weights, loaded = weights_path(find_model_folder(self.dir)), ""
        if self.state:
            # Before they are read: while a pipe flows, a better model may take their place.
            loaded = weights_checksum(weights)
        model, vocab = load(self.dir, pick_device(), self.weights)
        place, random = None, None
        if self.state and self.state.exists():
            from transformer_xl.inference.generate import load_state
            from transformer_xl.model.reading import Place

            found = load_state(self.state, weights, model)
            place, random = Place(found.mems, found.last_token, found.offset), found.random
        require_mem_len(model, self.mem_len)
        lengths = Lengths.of(model.config, segment_len=self.segment_len, mem_len=self.mem_len)
        reader = Reader(model, lengths, place)
        unknown = _Unknown(vocab)
        with ended_by_signals(), _opened(self.file) as file:
            try:
                show_all = self._show_lines if self.by == "line" else self._show_tokens
                blocks = _arriving(file, self.file)
                show_all(blocks, Cutter(vocab, self.by), Flow(reader), vocab, unknown)
                if reader.place.last_token is None:
                    why = (
                        "nothing of the text is in the vocabulary"
                        if unknown.n
                        else "a text of 0 tokens"
                    )
                    say(f"nothing to score: {why}")
            finally:
                if self.state:
                    self._save(self.state, reader, random, loaded)

    def _save(self, path: Path, reader: "Reader", random: "Tensor | None", weights: str) -> None:
        from transformer_xl.inference.generate import State, write_state

        mems, last_token, offset = reader.place
        if last_token is None:
            return
        state = State(mems, last_token, random, offset)
        write_state(path, state, weights, positions=reader.most_positions)
        say(f"the memory is in {path}; the same command goes on from there")

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
            # Of what was scored, also where the rest cannot be read.
            unknown.tell()
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
            unknown.tell()
            if self.json:
                figures = {"lines": lines.n_lines, **lines.total.figures(), "unknown": unknown.n}
                show(figures, as_json=True)


class _Unknown:
    """Counts what the vocabulary has no symbol for, and warns of it: not of each in a long text."""

    def __init__(self, vocab: "Vocab") -> None:
        self._vocab = vocab
        self._treated: Counter[str] = Counter()
        self.n = self._places = 0

    def see(self, piece: "Piece") -> None:
        """Take a piece of the text."""
        if not piece.unknown:
            return
        from transformer_xl.data.vocab import describe_unknown, treated

        found = treated(self._vocab, piece.unknown)
        self._treated += found
        self.n += piece.unknown.total()
        self._places += 1
        if self._places <= _WARNINGS:
            what = describe_unknown(piece.unknown, piece.line)
            say(f"warning: not in the vocabulary: {what}; {_in_words(found)}")
        elif self._places == _WARNINGS + 1:
            say("warning: further warnings are suppressed; the total follows at the end")

    def tell(self) -> None:
        """Say at the end what there was."""
        if self._places > _WARNINGS:
            say(f"warning: {self.n:,} in all not in the vocabulary; {_in_words(self._treated)}")


def _in_words(treated: Counter[str]) -> str:
    """Say what was done with the unknown, with numbers where it is not the same for all."""
    if len(treated) == 1:
        return next(iter(treated))
    return ", ".join(f"{n:,} {how}" for how, n in sorted(treated.items(), reverse=True))


def _opened(path: Path) -> AbstractContextManager[Any]:
    try:
        return nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb")
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}") from error


def _arriving(file: Any, path: Path) -> Iterator[bytes]:
    """Read a text in blocks, as they come; an empty one says that no more is there yet."""
    try:
        descriptor = file.fileno()
        is_waited_for = not stat.S_ISREG(fstat(descriptor).st_mode)
    except UnsupportedOperation:
        descriptor, is_waited_for = -1, False
    try:
        if is_waited_for:
            # Not by the file object: whoever waits in it locks it, and the end of the program too.
            yield from _as_they_come(lambda: read(descriptor, _BLOCK))
        while block := b"" if is_waited_for else file.read(_BLOCK):
            yield block
    except OSError as error:
        name = "the standard input" if str(path) == "-" else path
        raise OSError(f"cannot read {name} to its end: {error.strerror}") from error


def _as_they_come(read_block: Callable[[], bytes]) -> Iterator[bytes]:
    """Read in a thread of its own; yield an empty block when nothing more has come for a moment."""
    # Short: what comes faster than it is scored waits where it comes from.
    blocks: Queue[bytes | OSError] = Queue(maxsize=4)

    def fill() -> None:
        try:
            while block := read_block():
                blocks.put(block)
            blocks.put(b"")
        except OSError as error:
            blocks.put(error)

    Thread(target=fill, daemon=True).start()
    # When what has come is read even if it fills no segment; None: all of it was.
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
