"""One text read in pieces of any length, as if it had come at once."""

from typing import Any, NamedTuple

import torch

from transformer_xl.nn.checks import as_tokens, whole
from transformer_xl.nn.memory import KeptMemory, Memory
from transformer_xl.nn.mode import evaluating
from transformer_xl.nn.model import TransformerXL
from transformer_xl.nn.needs import require_capacity
from transformer_xl.nn.segment import require_memory


class Place(NamedTuple):
    """Where the reading of a text is."""

    mems: Memory | KeptMemory
    """The memory, which has read all tokens but the last."""
    last_token: int | None
    """That token; None at the start of a text."""
    offset: int = 0
    """How many tokens of the present segment the memory has read."""


class Reader:
    """Reads one text piece by piece; predicts each token from all that came before it.

    Segments lie where they would lie if the text had come at once. A piece that ends inside of a
    segment leaves what the segment has read in the memory, beyond ``mem_len``, until the segment
    is full. So each token sees the same positions however the text was cut, and its number
    differs by rounding alone. With ``attn_len`` of at most ``mem_len + 1`` it sees them wherever
    segments lie, and the memory holds ``mem_len`` positions at any moment.

    Some models also depend on how many tokens they read at once (``is_bound_to_segments``). To
    them one gives whole segments: ``room`` says how many tokens are missing.

    Args:
        model: The model. It reads as in evaluation mode; its mode is restored afterwards.
        segment_len: Tokens read at once, at most.
        mem_len: Remembered positions. None: as configured.
        attn_len: Keys a token sees, counting its own. None: as configured.
        place: Where to go on. None: at the start of a text.

    Raises:
        ValueError: A length is out of range.
    """

    def __init__(
        self,
        model: TransformerXL,
        *,
        segment_len: int = 128,
        mem_len: int | None = None,
        attn_len: int | None = None,
        place: Place | None = None,
    ) -> None:
        segment_len = whole("segment_len", segment_len, 1)
        mem_len, attn_len = whole("mem_len", mem_len), whole("attn_len", attn_len, 1)
        self.mem_len = model.config.mem_len if mem_len is None else mem_len
        require_capacity(model, self.mem_len, remedy="remember fewer positions")
        self.model, self.segment_len = model, segment_len
        self.attn_len = model.config.attn_len if attn_len is None else attn_len
        mems, last_token, offset = place or Place(model.start_memory(1, mem_len), None)
        # A segment that was longer than these are is over.
        offset = offset if offset < segment_len else 0
        require_memory(mems, model.config, 1)
        if model.config.kind == "transformer_xl":
            # So is a memory that was longer.
            mems = mems.last(self.mem_len + offset)
        self.place = Place(
            model.keep(mems) if isinstance(mems, Memory) else mems, last_token, offset
        )

    @property
    def is_bound_to_segments(self) -> bool:
        """Whether the numbers depend on how many tokens are read at once.

        Absolute positions are counted from the end of what is read, and enhanced recurrence
        remembers something else than a segment itself attends to.
        """
        config = self.model.config
        return config.attn_type in (2, 3) or config.enhanced_recurrence

    @property
    def most_positions(self) -> int:
        """How many positions the memory holds at most, while a segment is being filled."""
        return self.mem_len + (0 if self._is_windowed else self.segment_len - 1)

    @property
    def room(self) -> int:
        """How many tokens it takes to fill the present segment."""
        is_first = self.place.last_token is None
        return self.segment_len - self.place.offset + is_first

    @torch.no_grad()
    def read(self, ids: Any, *, scored: bool = True) -> list[float | None]:
        """Read tokens; return the log-probability of each, in nats; None for the first of a text.

        Args:
            ids: The tokens, in any array, tensor or sequence.
            scored: Whether to predict them. If not, nothing is returned.

        Raises:
            ValueError: They are no integers, or one is outside the vocabulary.
        """
        tokens = as_tokens(ids, self.model.config).tolist()
        found: list[float | None] = []
        start = 0
        if self.place.last_token is None and tokens:
            self.place, start = self.place._replace(last_token=tokens[0]), 1
            found += [None] * scored
        with evaluating(self.model):
            while start < len(tokens):
                stop = start + self.room
                found += self._read(tokens[start:stop], scored)
                start = stop
        return found

    @property
    def _is_windowed(self) -> bool:
        return self.attn_len is not None and self.attn_len <= self.mem_len + 1

    def _read(self, targets: list[int], scored: bool) -> list[float]:
        """Read the last token and all of these but their last, within a segment."""
        mems, last_token, offset = self.place
        assert last_token is not None
        offset = (offset + len(targets)) % self.segment_len
        tokens = torch.tensor([[last_token, *targets[:-1]]], device=self.model.device)
        lengths = {
            "mem_len": self.mem_len + (0 if self._is_windowed else offset),
            "attn_len": self.attn_len,
            "ext_len": 0,
        }
        found = []
        if scored:
            out = self.model(tokens, mems, tokens.new_tensor([targets]), **lengths)
            assert out.nll is not None
            mems, found = out.mems, (-out.nll[0]).tolist()
        else:
            _, mems = self.model.read(tokens, mems, **lengths)
        # All at once: an interrupt before this line leaves a place that can be gone on from.
        self.place = Place(mems, targets[-1], offset)
        return found
