"""What a token was predicted from: the places that all heads of all layers look at."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.model import LanguageModel, Memory


def shares(model: LanguageModel, tokens: Sequence[int], mems: Memory) -> Float[Tensor, "B S"]:
    """Return, for the token of each stream, its shares of attention, oldest place first.

    They are the mean over the heads and layers and add up to one; the last is the token's own.

    Args:
        model: The model.
        tokens: A token of each stream.
        mems: What was before it.

    Raises:
        ValueError: The model has no attention.
    """
    read = torch.tensor(tokens, device=model.device)[:, None]
    weights = torch.stack(model.attention_weights(read, mems)).float()
    return weights[..., -1, :].mean((0, 2)).cpu()


def most_seen(seen: Float[Tensor, " S"], most: int) -> tuple[tuple[int, float], ...]:
    """Return how far back the largest shares are, 0 the newest place, and the shares, falling."""
    values, places = seen.topk(min(most, len(seen)))
    last = len(seen) - 1
    found = zip(places.tolist(), values.tolist(), strict=True)
    return tuple((last - place, share) for place, share in found if share > 0)
