"""How far a program is from its model, and how far the model itself is from exact numbers."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.interop.export.exported_step import Step
from transformer_xl.model import LanguageModel, Memory
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.reading import read, read_all

Run = Callable[..., Sequence[Tensor]]
"""A program: takes tokens and memory as tensors, returns log-probabilities and the new memory."""

EQUAL = 1e-5
"""Of log-probabilities: up to here two numbers count as equal."""
MOST_TIMES = 4.0
"""Where the model itself is no nearer to exact numbers: so many times as far a program may be.
Sums in another order were up to 2.3 times as far off, in the worst of some thousand numbers."""

_STEPS = 4
_PIECE = 64


class Errors(NamedTuple):
    """Largest differences of log-probabilities, in nats; not a number if one of them is none."""

    difference: float
    """Of the program from the model."""
    program: float
    """Of the program from the model in double precision."""
    model: float
    """Of the model itself, in single precision, from the same."""

    @property
    def is_equal(self) -> bool:
        """Whether the program computes what the model does, as well as single precision can.

        It is as near to exact numbers as 1e-5, or, in a model that magnifies rounding so much that
        the model itself is not, at most four times as far from them as the model.
        """
        # What is not a number is not small either.
        return self.program <= max(EQUAL, MOST_TIMES * self.model)


@torch.no_grad()
def compare(step: Step, run: Run) -> Errors:
    """Run a program beside the model in both precisions, on memories of all ages.

    They begin with the memory of a text of ``mem_len`` random tokens, which one of three streams
    sees whole, one half and one not at all, and go on for four steps, each with its own memory.
    """
    draw = torch.Generator().manual_seed(0)
    model, lengths = step.model, step.lengths
    exact = copy.deepcopy(model).double()
    worst = torch.zeros(3, dtype=torch.float64)
    for streams in (1, 3):

        def some(n: int, streams: int = streams) -> Int[Tensor, "B n"]:
            return torch.randint(model.config.vocab_size, (streams, n), generator=draw)

        mems = _having_read(model, some(step.mem_len), lengths)
        hidden = torch.linspace(0, step.mem_len, streams).long()
        if mems.forgotten is not None:
            hidden = hidden.maximum(mems.forgotten)
        mems = mems.forgetting(hidden)
        state = mems.state_dict()
        memory = [*(state[name] for name in step.memory_names), step.mem_len - hidden]
        exact_mems = mems.to(dtype=torch.float64)
        for _ in range(_STEPS):
            tokens = some(step.n_tokens)
            own, mems = _predicted(model, tokens, lengths, mems)
            right, exact_mems = _predicted(exact, tokens, lengths, exact_mems)
            found, *memory = run(tokens, *memory)
            pairs = ((found, own), (found, right), (own, right))
            # The larger of two, and what is not a number where either is none.
            worst = worst.maximum(torch.stack([(a.double() - b).abs().max() for a, b in pairs]))
    return Errors(*worst.tolist())


def _predicted(
    model: LanguageModel, tokens: Int[Tensor, "B T"], lengths: Lengths, mems: Memory
) -> tuple[Float[Tensor, "B T V"], Memory]:
    ((_, hidden, _, after),) = read(model, tokens, lengths, mems)
    return model.head.log_probs(hidden), after


def _having_read(model: LanguageModel, tokens: Int[Tensor, "B n"], lengths: Lengths) -> Memory:
    """Return the memory after a text, read in pieces: all at once would take far more memory."""
    mems = model.keep(model.start_memory(len(tokens), lengths.mem_len))
    return read_all(model, tokens, lengths._replace(segment_len=_PIECE), mems)
