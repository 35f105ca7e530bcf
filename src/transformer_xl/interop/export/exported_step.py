"""A step of a model as a function of tensors alone: what a program of another kind can be made of.

It is the model itself that is called; what is here gives its memory a fixed shape. The newest of
``mem_len`` positions are last, and ``seen`` says for each stream how many of them it sees.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.model import LanguageModel, Memory, TransformerXL
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.memory import KeysAndValues
from transformer_xl.model.reading import read


class Step(nn.Module, ABC):
    """What the two kinds of steps share; :func:`make_step` makes the one that fits a model.

    Attributes:
        mem_len: Remembered positions.
        n_tokens: Tokens that a step reads.
        lengths: The lengths with which it reads them.
        memory_names: What the tensors of the memory are called.
        batch_dims: Which dimension of each of them the streams are.
    """

    memory_names: tuple[str, ...]
    batch_dims: tuple[int, ...]

    def __init__(self, model: LanguageModel, mem_len: int, n_tokens: int) -> None:
        super().__init__()
        self.model, self.mem_len, self.n_tokens = model, mem_len, n_tokens
        self.lengths = Lengths.of(model.config, segment_len=n_tokens, mem_len=mem_len, ext_len=0)

    @abstractmethod
    def start(self, batch_size: int) -> tuple[Tensor, ...]:
        """Return the memory at the start of a text, and how much of it is seen."""

    def _start_seen(self, batch_size: int) -> Tensor:
        seen = len(self.model.start_memory(1, self.mem_len))
        return torch.full((batch_size,), seen, dtype=torch.int64)

    def _read(self, tokens: Tensor, mems: Memory) -> tuple[Tensor, ...]:
        """Return the distribution after each token, the new memory, and how much is seen of it."""
        ((_, hidden, _, after),) = read(self.model, tokens, self.lengths, mems)
        assert after.forgotten is not None
        new = after.store.stacked().values()
        return self.model.head.log_probs(hidden), *new, self.mem_len - after.forgotten


class KeptStep(Step):
    """A step with keys and values as the memory: nothing is projected twice."""

    memory_names = ("keys", "values")
    batch_dims = (2, 2)

    @torch.no_grad()
    def __init__(self, model: LanguageModel, mem_len: int, n_tokens: int) -> None:
        super().__init__(model, mem_len, n_tokens)
        assert isinstance(model, TransformerXL)
        # They depend on the weights alone: the program holds them.
        model.project_positions(mem_len + n_tokens, self.lengths.clamp_len)

    def start(self, batch_size: int) -> tuple[Tensor, ...]:
        """Return the memory at the start of a text, and how much of it is seen."""
        config = self.model.config
        shape = (config.n_layer, config.n_head, batch_size, self.mem_len, config.head_width)
        zeros = torch.zeros(shape, dtype=self.model.dtype)
        return zeros, zeros.clone(), self._start_seen(batch_size)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        keys: Float[Tensor, "N H B M K"],
        values: Float[Tensor, "N H B M K"],
        seen: Int[Tensor, " B"],
    ) -> tuple[
        Float[Tensor, "B T V"],
        Float[Tensor, "N H B M K"],
        Float[Tensor, "N H B M K"],
        Int[Tensor, " B"],
    ]:
        """Read tokens; return the distribution after each, and the memory after all of them."""
        store = _Given(keys.unbind(), values.unbind())
        return self._read(tokens, Memory(store, self.mem_len - seen))  # pyright: ignore[reportReturnType]


class StateStep(Step):
    """A step with hidden states as the memory, for absolute positions: keys change each time."""

    memory_names = ("states",)
    batch_dims = (1,)

    def start(self, batch_size: int) -> tuple[Tensor, ...]:
        """Return the memory at the start of a text, and how much of it is seen."""
        config = self.model.config
        shape = (config.n_layer, batch_size, self.mem_len, config.d_model)
        return torch.zeros(shape, dtype=self.model.dtype), self._start_seen(batch_size)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        states: Float[Tensor, "N B M D"],
        seen: Int[Tensor, " B"],
    ) -> tuple[Float[Tensor, "B T V"], Float[Tensor, "N B M D"], Int[Tensor, " B"]]:
        """Read tokens; return the distribution after each, and the memory after all of them."""
        return self._read(tokens, Memory(states.unbind(), self.mem_len - seen))  # pyright: ignore[reportReturnType]


def make_step(
    model: LanguageModel, *, mem_len: int | None = None, n_tokens: int = 1
) -> KeptStep | StateStep:
    """Make the step of a model.

    Args:
        model: The model, in evaluation mode, on the processor; it stays as it is.
        mem_len: Remembered positions. None: as the model is configured.
        n_tokens: Tokens that a step reads.

    Raises:
        ValueError: The model cannot be exported, or a length is out of range.
    """
    config = model.config
    mem_len = Lengths.of(config, mem_len=mem_len).mem_len
    if not model.remembers_positions:
        raise ValueError(f"a model of kind={config.kind!r} has no memory of positions to hand in")
    if mem_len < 1:
        raise ValueError(f"mem_len={mem_len}: a step without a memory knows one token; at least 1")
    if n_tokens < 1:
        raise ValueError(f"n_tokens={n_tokens} must be at least 1")
    if model.dtype != torch.float32:
        raise ValueError(f"weights in {model.dtype} are for reading here: export those in float32")
    is_absolute = config.attn_type in (2, 3)
    if config.start_memory == "zeros" and config.norm_first and not is_absolute:
        raise ValueError(
            "start_memory='zeros' with norm_first=True: the keys of zeros are not zeros, and a "
            "step begins with zeros"
        )
    return (StateStep if is_absolute else KeptStep)(model, mem_len, n_tokens)


class _Given(KeysAndValues):
    """Keys and values that are handed in: what comes is put behind them, not into their room."""

    def with_room(self, T: int, mem_len: int) -> "_Given":
        self._before = [*self.keys], [*self.values]
        return self

    def join(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for longer, before, new in zip((self.keys, self.values), self._before, (k, v), strict=True):
            longer[layer] = torch.cat([before[layer], new.permute(2, 0, 1, 3)], 2)
        return self.keys[layer].permute(1, 2, 0, 3), self.values[layer].permute(1, 2, 0, 3)


def names(step: Step) -> Iterator[tuple[str, str]]:
    """Yield the memory's names: as it goes in, and as it comes out."""
    for name in (*step.memory_names, "seen"):
        yield name, f"new_{name}"
