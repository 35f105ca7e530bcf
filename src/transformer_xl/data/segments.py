"""Segments: B contiguous streams of a corpus, divided into segments of T tokens.

The corpus is read circularly. Stream ``b`` begins at ``b * (length // B)`` and is contiguous, so
that the memory of a stream always holds the text before the segment. The whole state is one
number: how many segments were read, or tokens, if the length of the segments varies.

With ``roll_seed``, each stream stays in its own part of the corpus, which is rotated by a random
offset in each epoch, so that segment boundaries and the composition of batches change. Each epoch
then has two discontinuities in a stream, at the end of the part and at the start of the next epoch,
where the memory and the target of the last token come from elsewhere. The last ``length % B``
tokens belong to no part.

Dimension key: B streams (those of this process), T tokens of a segment.
"""

from typing import NotRequired, TypedDict

import numpy as np
import torch
from jaxtyping import Bool, Int64, Integer, Shaped
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.data.completions import in_completion
from transformer_xl.data.recordings import Recordings
from transformer_xl.errors import InputError, SettingsError


class SegmentsState(TypedDict):
    """What :meth:`Segments.state_dict` saves; only ``segments_read`` and ``position`` change."""

    segments_read: int
    n_tokens: int
    batch_size: int
    segment_len: int
    position: NotRequired[int]
    """Tokens read of each stream, if not all segments had the same length."""


class Segments:
    """Reads a corpus, a text or recordings, in segments, forever.

    Args:
        tokens: The corpus; may be memory-mapped.
        batch_size: Number of streams.
        segment_len: Tokens of each stream in a segment; the most, if :attr:`length` varies.
        ext_len: Tokens before each segment that are repeated with it, as context.
        rows: The streams of this process, if several share them; None: all.
        roll_seed: Seed of the rotations, at least 0; None: no rotation.
        completions: Settings with ``completion_at``, to fill :attr:`completed`.

    Attributes:
        length: Tokens of each stream in the next segment.
        tokens_read: Number of tokens read of each stream.
        completed: Which targets of the segment read last belong to completions, or are predicted
            in recordings, (B, predicted); None for a text without ``completion_at``.
        starts: Where recordings begin in it, or a stream jumps to another part of the data, (B, T);
            None for a text.

    Raises:
        InputError: The corpus is shorter than one segment per stream.

    Example:
        >>> segments = Segments(np.arange(8), batch_size=2, segment_len=3)
        >>> tokens, targets = segments.next_segment()
        >>> tokens.tolist(), targets.tolist()
        ([[0, 1, 2], [4, 5, 6]], [[1, 2, 3], [5, 6, 7]])
        >>> segments.next_segment()[0].tolist()
        [[3, 4, 5], [7, 0, 1]]
    """

    def __init__(
        self,
        tokens: Integer[np.ndarray, " length"] | Recordings,
        batch_size: int,
        segment_len: int,
        ext_len: int = 0,
        rows: range | None = None,
        roll_seed: int | None = None,
        completions: ModelConfig | None = None,
    ) -> None:
        needed = batch_size * segment_len
        if len(tokens) < max(needed, 2):
            raise InputError(
                f"the text has {len(tokens):,} tokens, fewer than one segment per stream: "
                f"batch_size={batch_size} x segment_len={segment_len} needs {max(needed, 2):,}; "
                "lower batch_size or segment_len (and give up train.stages, if there are any: "
                "--train.stages with nothing behind it), or give more text"
            )
        self.batch_size = batch_size
        self.segment_len = segment_len
        self.ext_len = ext_len
        self.length = segment_len
        self.segments_read = 0
        self.tokens_read = 0
        self.completed: Bool[Tensor, "B predicted"] | None = None
        self.starts: Bool[Tensor, "B T"] | None = None
        self._tokens = tokens
        self._in_completion: Bool[np.ndarray, " length"] | None = None
        if completions is not None and completions.completion_at is not None:
            # The text is a ring: its end stands before its beginning.
            text = np.asarray(tokens)
            before = bool(in_completion(text, completions)[-1])
            self._in_completion = in_completion(text, completions, before)
        self._roll_seed = roll_seed
        self._rows = np.array(range(batch_size) if rows is None else rows, dtype=np.int64)
        self._stream_len = len(tokens) // batch_size

    @property
    def offset(self) -> int:
        """Position in its stream at which the next segment begins, in tokens.

        Without rotation it is taken modulo the length of the text.
        """
        if self._roll_seed is not None:
            return self.tokens_read
        return self.tokens_read % len(self._tokens)

    def next_segment(self) -> tuple[Shaped[Tensor, "B T ..."], Shaped[Tensor, "B predicted"]]:
        """Return the next inputs of each stream, and what is predicted at each position.

        Those of a text are tokens, and the token that follows each of them. The inputs begin with
        the ``ext_len`` before the segment; these have no targets.
        """
        if isinstance(self._tokens, Recordings):
            return self._next_recordings(self._tokens)
        # One token more than the segment: the target of its last token.
        first, stop = self.tokens_read - self.ext_len, self.tokens_read + self.length + 1
        places = self._places(first, stop)
        window = torch.from_numpy(self._tokens[places].astype(np.int64))
        if self._in_completion is not None:
            self.completed = torch.from_numpy(self._in_completion[places[:, self.ext_len : -1]])
        self.segments_read += 1
        self.tokens_read += self.length
        return window[:, :-1].contiguous(), window[:, self.ext_len + 1 :].contiguous()

    def _next_recordings(self, recordings: Recordings) -> tuple[Tensor, Tensor]:
        first, stop = self.tokens_read - self.ext_len, self.tokens_read + self.length
        # With one position before, to find out where a stream jumps.
        places = self._places(first - 1, stop)
        inputs, targets, starts = recordings.at(places[:, 1:])
        self.starts = starts | torch.from_numpy(np.diff(places) != 1)
        targets = targets[:, self.ext_len :].contiguous()
        self.completed = (
            ~targets.isnan() if recordings.are_real else targets != Recordings.UNCOUNTED
        )
        self.segments_read += 1
        self.tokens_read += self.length
        return inputs, targets

    def _places(self, first: int, stop: int) -> Int64[np.ndarray, "B length"]:
        """Return where in the text a span of the streams is; it may begin before their start."""
        rows = self._rows
        times = np.arange(first, stop)
        places = times[None]
        if self._roll_seed is not None:
            # Positions before the first epoch belong to it.
            epochs = np.maximum(times // self._stream_len, 0)
            epochs, where = np.unique(epochs, return_inverse=True)
            # Drawn for all streams, also for those of other processes.
            generators = [np.random.default_rng([self._roll_seed, int(n)]) for n in epochs]
            rolls = [x.integers(self._stream_len, size=self.batch_size) for x in generators]
            places = (times + np.stack(rolls, axis=1)[rows][:, where]) % self._stream_len
        return (rows[:, None] * self._stream_len + places) % len(self._tokens)

    def state_dict(self) -> SegmentsState:
        """Return the position and the sizes it refers to; the same for all rows."""
        state: SegmentsState = {
            "segments_read": self.segments_read,
            "n_tokens": len(self._tokens),
            "batch_size": self.batch_size,
            "segment_len": self.segment_len,
        }
        if self.tokens_read != self.segments_read * self.segment_len:
            state["position"] = self.tokens_read
        return state

    def load_state_dict(self, state: SegmentsState) -> None:
        """Resume from a saved state.

        Raises:
            SettingsError: The state counts segments of another shape or of another text.
        """
        ours = self.state_dict()
        for name in ("n_tokens", "batch_size", "segment_len"):
            if state[name] != ours[name]:
                raise SettingsError(
                    f"the saved position belongs to {name}={state[name]}, not {ours[name]}: "
                    "resume with the text and the settings that the run began with"
                )
        self.segments_read = state["segments_read"]
        self.tokens_read = state.get("position", self.segments_read * self.segment_len)
