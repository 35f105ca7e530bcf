"""The input of a forward pass, a segment, and its output.

Rows may be padded, and documents may begin within them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.model.arguments import require_tensor, whole_tensor
from transformer_xl.model.memory import Memory
from transformer_xl.ops.nll import IGNORED


@dataclass(kw_only=True)
class Output:
    """The output of a forward pass."""

    hidden: Float[Tensor, "B T D"]
    """Output of the layers, after dropout while training."""
    raw_hidden: Float[Tensor, "B T D"]
    """Output of the layers before dropout; the same tensor as ``hidden`` without dropout."""
    mems: Memory
    """The memory after this segment, to be passed with the next one."""
    nll: Float[Tensor, "B predicted"] | None = None
    """-log p of each target in nats, in token order; 0 for padding and for targets of -100; None
    without targets."""
    is_real: Bool[Tensor, "B predicted"] | None = None
    """Mask of the targets that are no padding; None: all, or no targets."""
    targets: Int[Tensor, "B predicted"] | None = None
    """The targets that were given."""
    log_probs: Float[Tensor, "B T V"] | None = None
    """Log-probabilities of the next token; None with targets, or with ``predicts=False``."""

    @cached_property
    def loss(self) -> Float[Tensor, ""] | None:
        """The mean of ``nll`` over the targets that are neither padding nor -100.

        Without any such target it is 0, and so are its gradients, where
        ``torch.nn.functional.cross_entropy`` returns NaN. None where no targets were given.
        """
        if self.nll is None or self.targets is None:
            return None
        counted = self.targets != IGNORED
        if self.is_real is not None:
            return self.nll.sum() / (counted & self.is_real).sum().clamp(min=1)
        # The factor is exactly 1 where no target is -100.
        return self.nll.mean() * (counted.numel() / counted.sum().clamp(min=1))


class Segment(NamedTuple):
    """The tokens, or vectors in their place, of one forward pass."""

    tokens: Int[Tensor, "B T"] | None
    vectors: Float[Tensor, "B T D"] | None
    short: Int[Tensor, " B"] | None = None
    """How many positions at the end of each row are padding. None: no padding."""
    starts: Bool[Tensor, "B T"] | None = None
    """Where documents begin. None: nowhere."""

    @classmethod
    def of(
        cls,
        tokens: Tensor | None,
        vectors: Tensor | None,
        lengths: Tensor | None,
        starts: Tensor | None,
        config: ModelConfig,
    ) -> "Segment":
        """Validate the arguments of a forward pass; documents also begin at ``reset_at``.

        Padding is overwritten, so it may hold anything: an index outside the vocabulary, or NaN.

        Raises:
            ValueError: An argument is no tensor or has a wrong dtype; shapes are inconsistent; a
                length is out of range.
        """
        if (tokens is None) == (vectors is None):
            given = "both" if vectors is not None else "neither"
            raise ValueError(f"a segment is tokens or inputs_embeds: {given} of them is given")
        if tokens is not None:
            tokens = whole_tensor("tokens", tokens)
            if tokens.ndim != 2 or not all(tokens.shape):
                raise ValueError(
                    f"tokens of shape {tuple(tokens.shape)} must be (streams, length) and not empty"
                )
        if vectors is not None and not (
            require_tensor("inputs_embeds", vectors).is_floating_point()
            and vectors.ndim == 3
            and all(vectors.shape)
            and vectors.shape[2] == config.d_model
        ):
            raise ValueError(
                f"inputs_embeds of shape {tuple(vectors.shape)} must be (streams, length, "
                f"{config.d_model}), as wide as the model, and not empty"
            )
        segment = cls(tokens, vectors)
        if starts is not None:
            if (
                require_tensor("starts", starts).shape != segment.shape
                or starts.dtype != torch.bool
            ):
                raise ValueError(
                    f"starts of shape {tuple(starts.shape)} and {starts.dtype} must say true or "
                    f"false for each place of a segment of shape {segment.shape}"
                )
            segment = segment._replace(starts=starts.to(segment.device))
        if config.reset_at is not None and tokens is not None:
            begins = tokens == config.reset_at
            begins = begins if segment.starts is None else begins | segment.starts
            segment = segment._replace(starts=begins)
        return segment if lengths is None else segment._padded(lengths)

    def _padded(self, lengths: Tensor) -> "Segment":
        B, T = self.shape
        is_one_each = whole_tensor("lengths", lengths).shape == (B,)
        if not is_one_each or not 0 <= int(lengths.min()) <= int(lengths.max()) <= T:
            raise ValueError(
                f"lengths={lengths.tolist()} must be one for each of the {B} rows, from 0 to {T}"
            )
        short = T - lengths.to(self.device, torch.int64)
        if not short.any():
            return self
        segment = self._replace(short=short)
        padding, (tokens, vectors, _, starts) = ~segment.is_real(T), self
        return segment._replace(
            tokens=None if tokens is None else tokens.masked_fill(padding, 0),
            vectors=None if vectors is None else vectors.masked_fill(padding[..., None], 0.0),
            starts=None if starts is None else starts & ~padding,
        )

    def checked_targets(
        self, targets: Tensor, ext_len: int, context: int | None
    ) -> Int[Tensor, "B predicted"]:
        """Validate the targets of a segment; arguments as in ``TransformerXL.forward``.

        Raises:
            ValueError: They are no integers, or their shape is wrong.
        """
        targets, shape = whole_tensor("targets", targets), self.shape
        least, most = (0, ext_len) if context is None else (context, context)
        missing = shape[1] - targets.shape[-1] if targets.ndim == 2 else -1
        is_pair = targets.ndim == 2 and len(targets) == shape[0]
        if not (is_pair and least <= missing <= most and targets.shape[1]):
            raise ValueError(
                f"targets of shape {tuple(targets.shape)} must have the shape of the tokens, "
                f"{shape}" + f", but for the first {most}" * (most > 0)
            )
        return targets

    @property
    def shape(self) -> tuple[int, int]:
        """Batch size and length (B, T)."""
        given = self.tokens if self.vectors is None else self.vectors
        assert given is not None
        return given.shape[0], given.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the tokens or vectors."""
        given = self.tokens if self.vectors is None else self.vectors
        assert given is not None
        return given.device

    def is_real(self, n: int) -> Bool[Tensor, "B n"]:
        """Mark the positions, of the last ``n``, that are no padding."""
        B, T = self.shape
        place = torch.arange(T - n, T, device=self.device)
        if self.short is None:
            return torch.ones(B, n, dtype=torch.bool, device=self.device)
        return place < T - self.short[:, None]

    def embedded(
        self, embedding: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Float[Tensor, "B T D"]:
        """Return the input of the first layer."""
        if self.vectors is not None:
            return self.vectors.to(dtype)
        assert self.tokens is not None
        return embedding(self.tokens)

    def first_keys(
        self, M: int, forgotten: Int[Tensor, " B"] | None
    ) -> Int[Tensor, " B"] | Int[Tensor, "B T"] | None:
        """Return the index of the first key that each stream sees, memory of length M included.

        If documents begin in the segment, there is an index for each query.
        """
        if self.starts is None:
            return forgotten
        place = torch.arange(M, M + self.starts.shape[1], device=self.device)
        before = 0 if forgotten is None else forgotten[:, None]
        return torch.where(self.starts, place, before).cummax(1).values

    def counted_from_own_end(self, positions: Float[Tensor, "S D"]) -> Float[Tensor, "*B S D"]:
        """Shift absolute positions of S states so that they count from the last real token.

        A row that is all padding gets zeros, so that its memory does not change.
        """
        if self.short is None:
            return positions
        S, T = len(positions), self.shape[1]
        place = torch.arange(S, device=positions.device) + self.short[:, None]
        by_row = positions[place.clamp(max=S - 1)]
        return by_row.masked_fill((self.short == T)[:, None, None], 0.0)

    def left(
        self,
        mems: Memory,
        first_keys: Int[Tensor, " B"] | Int[Tensor, "B T"] | None,
        M: int,
        kept: int,
        mem_len: int,
    ) -> Memory:
        """Return the memory after a segment, in which each row ends with its own last token.

        Args:
            mems: The extended memory; if rows are padded, not truncated yet.
            first_keys: What :meth:`first_keys` returned.
            M: Length of the memory before the segment.
            kept: How many positions of the segment were appended.
            mem_len: Maximum length of the memory.
        """
        if self.starts is not None and first_keys is not None and kept:
            # The next segment continues the document of the last position.
            cut = M + kept - len(mems)
            mems = mems.forgetting(first_keys[:, kept - 1] - cut)
        return mems if self.short is None else mems.realigned(self.short, mem_len)
