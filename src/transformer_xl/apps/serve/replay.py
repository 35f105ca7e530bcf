"""Reading again what was appended to a text since its memory was stored."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from transformer_xl.apps.serve.session_store import Turn
from transformer_xl.inference.generate import PROMPT_SEGMENT
from transformer_xl.model import SEGMENT_LEN, LanguageModel, Lengths, Memory, Piece, read


def replay(
    model: LanguageModel,
    turns: Sequence[Turn],
    mems: Memory | None,
    last_token: int | None,
    run: Callable[[Callable[[], Any]], Any] = lambda function: function(),
) -> tuple[Memory, int]:
    """Return the memory after some turns, up to rounding that of when they were taken.

    Args:
        model: The model, in evaluation mode.
        turns: What was appended, in order; one token at least.
        mems: The memory before. None: that of the start of a text.
        last_token: The last token before, which is not in the memory. None: there is none.
        run: Calls a function that reads one segment, in the thread that owns the model.

    Returns:
        The memory of all tokens but the last, and the last one.
    """
    config = model.config
    # As a prompt is read, and as tokens are drawn: one by one, which is the same in segments if
    # each token sees as many positions.
    prompts = Lengths.of(config, segment_len=PROMPT_SEGMENT, ext_len=0)
    steps = Lengths.of(config, segment_len=SEGMENT_LEN, ext_len=0).windowed()
    if model.depends_on_segments:
        steps = Lengths.of(config, segment_len=1, ext_len=0)
    start = model.start_memory(1, config.mem_len) if mems is None else mems
    memory: Memory = run(partial(torch.no_grad()(model.keep), start))
    last: tuple[int, ...] = () if last_token is None else (last_token,)
    for turn in turns:
        prompt = (*last, *turn.read)
        unread = prompt if turn.drawn else prompt[:-1]
        for tokens, lengths in ((unread, prompts), (tuple(turn.drawn[:-1]), steps)):
            if tokens:
                pieces = read(model, torch.tensor([tokens]), lengths, memory)
                while (after := run(partial(_read_next, pieces))) is not None:
                    memory = after
        last = (*prompt, *turn.drawn)[-1:]
    return memory.seen(), next(iter(last))


@torch.no_grad()
def _read_next(pieces: Iterator[Piece]) -> Memory | None:
    """Read the next segment; return the memory after it, None at the end."""
    piece = next(pieces, None)
    return None if piece is None else piece.mems
