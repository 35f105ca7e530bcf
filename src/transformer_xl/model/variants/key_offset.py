"""Keys of which a part is that of the token before.

On source code they gain 0.41 bits per token in three minutes of training, on prose nothing
(docs/experiments.md).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from transformer_xl.model.segment import View


def own_width(head_width: int) -> int:
    """Return how many features of a key are its token's; the others are the token's before it."""
    return head_width // 2


def offset_keys(k: Float[Tensor, "B S H K"], view: View) -> Float[Tensor, "B S H K"]:
    r"""Return keys whose second half is that of the token before.

    With the halves a and b of what is projected from each token, the key of position j is

    $$k_j = [a_j, b_{j-1}]$$

    so that a query which looks for a token in b attends to what followed it: one layer does what
    otherwise takes two (induction heads; the partial key offset of modded-nanogpt, 2025). The first
    key of a document, and the oldest one of a memory, have zeros.
    """
    # With heads outermost, as attention reads them.
    own, before = k.permute(2, 0, 1, 3).tensor_split([own_width(k.shape[-1])], -1)
    before = F.pad(before[:, :, :-1], (0, 0, 1, 0))
    if (first := view.first_key) is not None:
        B, S = k.shape[:2]
        first = first.view(B, -1).clamp(max=S - 1)
        is_first = torch.zeros(B, S, dtype=torch.bool, device=k.device).scatter(1, first, True)
        before = before.masked_fill(is_first[None, :, :, None], 0)
    return torch.cat([own, before], -1).permute(1, 2, 0, 3)
