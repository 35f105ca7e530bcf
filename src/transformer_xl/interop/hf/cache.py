"""The memory of a batch of texts as a cache of transformers."""

import torch
from torch import Tensor
from transformers import Cache

from transformer_xl.errors import InputError
from transformer_xl.model import Decoder, LanguageModel, Lengths, Memory

# Enough tokens to distinguish the whole text from its continuation.
_TAIL = 16


class TransformerXLCache(Cache):
    """The memory of a batch of texts, as a cache of transformers.

    A call of the model returns a new one and does not change its input, so that several
    continuations can start from the same memory. Within ``generate``, which does not share its
    cache, single tokens are read by a decoder that is passed from cache to cache.

    Attributes:
        seen: Number of columns of tokens that were read, including padding.
        tail: The last tokens that were read; None for vectors.
        is_stepped: Whether the next call may advance the decoder, which invalidates this cache.
    """

    is_initialized = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, mems: Memory | Decoder, seen: int = 0, tail: Tensor | None = None) -> None:
        super().__init__(layers=[])
        self._state, self.seen, self.tail, self.is_stepped = mems, seen, tail, False

    @property
    def mems(self) -> Memory:
        """The memory, as in calls of :class:`~transformer_xl.TransformerXL`."""
        return self._state if isinstance(self._state, Memory) else self._state.memory()

    def decoder(self, model: LanguageModel, lengths: Lengths) -> Decoder:
        """Return the decoder that continues from this memory."""
        if isinstance(self._state, Decoder):
            return self._state
        return Decoder.of(model, lengths._replace(segment_len=1), self._state)

    def after(
        self, mems: Memory | Decoder, tokens: Tensor | None, n_tokens: int
    ) -> "TransformerXLCache":
        """Return the cache after so many tokens were read; None for vectors."""
        tail = None
        if tokens is not None and (self.tail is not None or not self.seen):
            before = [] if self.tail is None else [self.tail]
            tail = torch.cat([*before, tokens[:, -_TAIL:]], 1)[:, -_TAIL:]
        return TransformerXLCache(mems, self.seen + n_tokens, tail)

    def is_beginning_of(self, tokens: Tensor) -> bool:
        """Whether these tokens are the whole text, including those that were read already."""
        if tokens.shape[1] < self.seen:
            return False
        if self.tail is None:
            return tokens.shape[1] > self.seen
        newest = tokens[:, self.seen - self.tail.shape[1] : self.seen].to(self.tail.device)
        times = len(self.tail) // max(len(newest), 1)
        return torch.equal(newest.repeat_interleave(times, 0), self.tail)

    def __len__(self) -> int:
        return len(self.mems.by_name()[0])

    @property
    def batch_size(self) -> int:
        """Number of texts."""
        return self._state.batch_size

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns of tokens that were read, including padding."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: the length of texts is not limited."""
        return -1

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select texts by index; repetition is allowed."""
        mems = self._state
        self._state = mems.take(indices) if isinstance(mems, Decoder) else mems.select(indices)
        if self.tail is not None:
            self.tail = self.tail[indices.to(self.tail.device)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the texts for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each text."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def repeated(self, repeats: int) -> "TransformerXLCache":
        """Return another cache with each text repeated."""
        cache = TransformerXLCache(self.mems, self.seen, self.tail)
        cache.batch_repeat_interleave(repeats)
        return cache

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, while the memory still has the whole text.

        Args:
            tokens_to_remove: How many, as a negative number.

        Raises:
            InputError: The text is shorter, or a part of it has left the memory.
        """
        n, state = -tokens_to_remove, self._state
        length = len(state) if isinstance(state, Memory) else state.n_positions
        if not 0 <= n <= self.seen or length != self.seen:
            raise InputError(
                f"tokens_to_remove={tokens_to_remove} must be from {-self.seen} to 0, and of the "
                f"{self.seen} tokens, only {length} are in the memory: what tokens saw before them "
                "has left it. Keep the cache of that time, which later calls do not change, or "
                "give past_key_values=None to begin"
            )
        if isinstance(state, Memory):
            state = state.without_last(n)
        else:
            state = state.fork()
            state.rewind(n)
        self._state, self.seen = state, self.seen - n
        if self.tail is not None:
            self.tail = self.tail[:, : max(self.tail.shape[1] - n, 0)]

    def reset(self) -> None:
        """Forget the text, as :meth:`crop` does."""
        self.crop(-self.seen)


def require_cache(cache: object) -> TransformerXLCache | None:
    """Return ``past_key_values`` if it is our cache, or None.

    Raises:
        TypeError: It is a cache of another kind.
    """
    if cache is None or isinstance(cache, TransformerXLCache):
        return cache
    raise TypeError(
        f"past_key_values is a {type(cache).__name__}, a Transformer-XL takes what its last call "
        "returned as past_key_values (a TransformerXLCache), or None to begin; in place of prefix "
        "tuning, which makes a cache of its own, use prompt tuning or LoRA"
    )
