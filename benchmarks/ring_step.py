"""A step of one token as a function of tensors of fixed shapes, which compilers can read whole.

It attends to a ring of keys and values, and returns those of the token instead of a new memory, so
that no program made of it has to copy the memory. Whoever calls it puts them into the ring.
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transformer_xl.model.segment import View
from transformer_xl.model.tokens import embedded

Scores = Callable[[Tensor], Tensor]
"""From a token, (1, 1), to the log-probabilities of the next one; remembers what it has read."""


class RingStep(nn.Module):
    """A token of each stream, with a memory that is full.

    Args:
        model: The model, in evaluation mode, with relative positions as in the paper.
        mem_len: Slots of the ring; position p is in slot p % mem_len.
    """

    def __init__(self, model: Any, mem_len: int) -> None:
        super().__init__()
        self.model, self.mem_len = model, mem_len
        # Constants, as they depend on the weights alone.
        for n, each in enumerate(
            model.positions.encode(model, mem_len + 1, 1, View(is_fixed=True))
        ):
            self.register_buffer(f"r{n}", each.r.permute(1, 2, 0).contiguous())

    def forward(
        self, tokens: Tensor, number: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Read tokens (B, 1) at a position, (1,), with keys and values (N, H, B, M, K).

        Returns:
            Log-probabilities, and the keys and values of the tokens, (N, H, B, 1, K).
        """
        model, M = self.model, self.mem_len
        content_bias, position_bias = (
            x.expand(len(model.layers), -1, -1)[:, :, None, None]
            for x in (model.content_bias, model.position_bias)
        )
        age = (number - 1 - torch.arange(M)) % M
        order = torch.cat([M - 1 - age, torch.full((1,), M)])
        new: list[tuple[Tensor, Tensor]] = []

        def attend(n: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
            new.append((k, v))
            scale = q.shape[-1] ** -0.5
            by_content, by_position = (
                (q + bias[n]) * scale for bias in (content_bias, position_bias)
            )
            position = (by_position @ getattr(self, f"r{n}")[:, None]).index_select(3, order)
            content = torch.cat([by_content @ keys[n].mT, by_content @ k.mT], -1)
            weight = (content + position).softmax(-1)
            return (weight[..., :-1] @ values[n] + weight[..., -1:] * v).permute(1, 2, 0, 3)

        x = embedded(model.embedding, tokens)
        for n, layer in enumerate(model.layers):
            attended = attend(n, *layer.project(x, x[:, :0]))
            x = layer.finish(x, layer.attention.merged(attended))
        x = model.final_norm(x)
        k, v = (torch.stack(each) for each in zip(*new, strict=True))
        return model.head.log_probs(x), k, v


def example(memory: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return inputs of the step, of one stream."""
    return torch.zeros(1, 1, dtype=torch.int64), torch.tensor([memory[0].shape[3]]), *memory


def ring_scores(run: Callable[..., Sequence[Tensor]], memory: Sequence[Tensor]) -> Scores:
    """Read tokens by a program that computes what `RingStep` does."""
    M = memory[0].shape[3]
    number = torch.tensor([M])

    def scores(token: Tensor) -> Tensor:
        slot = int(number) % M
        log_probs, *new = run(token, number, *memory)
        for ring, x in zip(memory, new, strict=True):
            ring[:, :, :, slot] = x[:, :, :, 0]
        number.add_(1)
        return log_probs[:, -1]

    return scores


def onnx_scores(path: Path, n_threads: int, memory: Sequence[Tensor], vocab: int) -> Scores:
    """Read tokens by ONNX Runtime, which reads and writes the tensors where they lie.

    The program is that of `RingStep`, or that of `txl export`, which returns the whole memory.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = n_threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [[x.name for x in each] for each in (session.get_inputs(), session.get_outputs())]
    log_probs, token = torch.empty(1, 1, vocab), torch.zeros(1, 1, dtype=torch.int64)

    def bound(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        binding = session.io_binding()
        binds = binding.bind_input, binding.bind_output
        given = [token, *inputs], [log_probs, *outputs]
        for bind, named, tensors in zip(binds, names, given, strict=True):
            for name, x in zip(named, tensors, strict=True):
                dtype = np.int64 if x.dtype == torch.int64 else np.float32
                bind(name, "cpu", 0, dtype, tuple(x.shape), x.data_ptr())
        return binding

    if "new_seen" in names[1]:
        # What was written is read next, and what was read is overwritten.
        now = [*memory, torch.full((1,), memory[0].shape[3])]
        then = [x.clone() for x in now]
        turns = cycle([bound(now, then), bound(then, now)])

        def scores(given: Tensor, _kept: Any = (now, then)) -> Tensor:
            token.copy_(given)
            session.run_with_iobinding(next(turns))
            return log_probs[:, -1]

        return scores
    number = torch.zeros(1, dtype=torch.int64)
    new = [torch.empty_like(x[:, :, :, :1]) for x in memory]
    binding = bound([number, *memory], new)

    def run(given: Tensor, at: Tensor, *_: Tensor) -> Sequence[Tensor]:
        token.copy_(given)
        number.copy_(at)
        session.run_with_iobinding(binding)
        return log_probs, *new

    return ring_scores(run, memory)
