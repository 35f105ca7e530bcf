"""The evaluation without memory (Al-Rfou et al., 2018): a window, anew for every token.

Each token is predicted from the ``window`` tokens before it, all of them read from nothing. For the
next token the window moves on by one and is read again: what the paper's Table 9 compares with.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.model import LanguageModel
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.reading import read


@torch.no_grad()
def window_nll(
    model: LanguageModel,
    text: Int[Tensor, " length"],
    window: int,
    *,
    attn_len: int | None = None,
    clamp_len: int | None = None,
    batch_size: int = 1,
    first: int = 1,
) -> Float[Tensor, " predicted"]:
    """Return -log p of every token from ``first`` on, each from a window of its own.

    Windows are read side by side, and only the last position of each is compared with the
    vocabulary. The first tokens, which have fewer than ``window`` before them, have shorter
    windows, read one by one.

    Args:
        model: The model, in evaluation mode; of any kind.
        text: The text, on the processor.
        window: Tokens in a window.
        attn_len: Keys a query sees, counting its own. None: as configured.
        clamp_len: Largest distance told apart. None: as configured.
        batch_size: Windows read side by side.
        first: The first token that is predicted; at least 1.
    """
    n = len(text) - 1
    lengths = Lengths.of(
        model.config,
        segment_len=window,
        mem_len=0,
        attn_len=attn_len,
        clamp_len=clamp_len,
        ext_len=0,
    )
    found = []

    def predict(windows: Int[Tensor, "B W"], targets: Int[Tensor, " B"]) -> None:
        (piece,) = read(model, windows, lengths, targets=targets[:, None])
        assert piece.nll is not None
        found.append(piece.nll[:, 0])

    for i in range(first, min(window, n + 1)):
        predict(text[None, :i], text[i : i + 1])
    if window <= n:
        # A view: the windows overlap in the text, and only those of one call are copied.
        windows, targets = text[:-1].unfold(0, window, 1), text[window:]
        whole = max(first - window, 0)
        windows, targets = windows[whole:], targets[whole:]
        for start in range(0, len(windows), batch_size):
            some = slice(start, start + batch_size)
            predict(windows[some], targets[some])
    return torch.cat(found)
