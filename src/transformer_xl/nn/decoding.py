"""One token of each stream at a time, in shapes that never change: what a CUDA graph replays."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.nn.checks import Rows, stream_numbers
from transformer_xl.nn.embedding import AdaptiveEmbedding, embedded
from transformer_xl.nn.language_model import LanguageModel
from transformer_xl.nn.lengths import Lengths
from transformer_xl.nn.memory import KeptMemory
from transformer_xl.nn.model import TransformerXL
from transformer_xl.nn.positions import Positions
from transformer_xl.nn.wrapping import adapters, projected, require_plain

Pick = Callable[[Float[Tensor, "B D"], Float[Tensor, " B"]], Int[Tensor, " B"]]
"""Chooses each stream's next token from what the layers put out and a number from [0, 1)."""


class Decoder:
    """Reads and writes one token of each stream at a time, as the model does with kept keys.

    Keys and values lie in a ring of ``mem_len + 1`` places, in which the newest takes the place of
    the oldest. Where the newest is, a number on the device says: no shape and no address depends
    on it. The order of the keys in the ring does not matter to the softmax; of the position
    product, made for every distance, each place picks the number that belongs to its distance.
    On a GPU the whole step is recorded once and then replayed, at a cost of one launch.

    Args:
        model: The model, in evaluation mode; its weights stay as they are.
        mems: What the streams have read.
        mem_len: How many positions are remembered. None: as configured.
        attn_len: How many keys a token sees, counting its own. None: as configured.
        clamp_len: Distances above it count as it. None: as configured.

    Raises:
        ValueError: Positions are absolute: then keys change with every token. Or it is another kind
            of model, a length is out of range, or the model has adapters or hooks.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        mems: KeptMemory,
        *,
        mem_len: int | None = None,
        attn_len: int | None = None,
        clamp_len: int | None = None,
    ) -> None:
        config = model.config
        if not isinstance(model, TransformerXL):
            raise ValueError(f"a model of kind={config.kind!r} has no keys: read with it itself")
        if config.attn_type in (2, 3):
            raise ValueError(
                f"attn_type={config.attn_type} has absolute positions, with which no keys can be "
                "kept: read with the model itself"
            )
        require_plain(model, "a decoder records what the model itself computes")
        self._model = model
        lengths = Lengths.of(config, mem_len=mem_len, attn_len=attn_len, clamp_len=clamp_len)
        self._mem_len, self._size = lengths.mem_len, lengths.mem_len + 1
        self._limit = lengths.windowed().attn_len
        mems = mems.last(self._mem_len)
        B, M, device = mems.batch_size, len(mems), mems.keys[0].device
        self._keys, self._values = (
            [_in_ring(x[:, :, mems.start : mems.stop], self._size) for x in tensors]
            for tensors in (mems.keys, mems.values)
        )
        self._all_positions = mems.positions
        positions: Sequence[Positions | None] = model._relative_positions(
            self._size, mems, lengths.clamp_len
        )
        self._positions = [each for each in positions if each is not None]
        self._n_read = M
        self._reset_at = config.reset_at
        self._can_forget = mems.forgotten is not None or self._reset_at is not None
        # On the device: how many tokens were read, and how many of the newest keys a stream sees.
        self._place = torch.tensor(M, device=device)
        self._seen = torch.full((B,), M, device=device)
        if mems.forgotten is not None:
            self._seen -= mems.forgotten
        self._places = torch.arange(self._size, device=device)
        # What a step takes and gives.
        self._tokens = torch.zeros(B, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(B, dtype=torch.float64, device=device)
        self._hidden = torch.zeros(B, config.d_model, dtype=self._keys[0].dtype, device=device)
        self._replays: dict[Pick | None, Callable[[], None]] = {}

    @torch.no_grad()
    def read(self, tokens: Int[Tensor, " B"]) -> Float[Tensor, "B D"]:
        """Read a token of each stream; return the output of the layers.

        Raises:
            IndexError: A token is outside the vocabulary (of a GPU, an error of the device).
            ValueError: There are not as many tokens as streams.
        """
        self._take(tokens)
        self._replay(None)
        return self._hidden.clone()

    @torch.no_grad()
    def write(
        self, tokens: Int[Tensor, " B"], numbers: Float[Tensor, "n B"], pick: Pick
    ) -> Int[Tensor, "n B"]:
        """Read a token of each stream and write ``n`` more; no token is waited for.

        The last ones are not read yet: they are what the next call begins with.

        Args:
            tokens: The last token of each stream, which was not read yet.
            numbers: Random numbers from [0, 1), one for each token.
            pick: What chooses the tokens; recorded with the step, so it must be one function for
                all calls, and do all its work on the device.

        Raises:
            ValueError: There are not as many tokens or numbers as streams.
        """
        self._take(tokens)
        if numbers.shape[1] != len(tokens):
            raise ValueError(f"{numbers.shape[1]} random numbers a step for {len(tokens)} streams")
        written = self._tokens.new_empty(numbers.shape)
        for row, each in zip(written, numbers.to(self._numbers), strict=True):
            self._numbers.copy_(each)
            self._replay(pick)
            row.copy_(self._tokens)
        return written

    def _take(self, tokens: Tensor) -> None:
        if tokens.shape != self._tokens.shape:
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} must be one for each of the "
                f"{len(self._tokens)} streams"
            )
        if adapters(self._model):
            raise ValueError(
                "the model was given adapters, which a decoder that was made before does not "
                "know: read with the model itself, or merge them and make another decoder"
            )
        self._tokens.copy_(tokens)

    def reset(self, rows: Rows) -> None:
        """Let some streams begin anew, without a past."""
        self._can_forget = True
        self._seen[stream_numbers(rows, len(self._seen), self._seen.device)] = 0

    def memory(self) -> KeptMemory:
        """Return what is remembered, for the model or another decoder to go on from."""
        M = min(self._n_read, self._mem_len)
        place = (self._places[:M] + (self._n_read - M)) % self._size
        keys, values = (
            [x.index_select(2, place) for x in ring] for ring in (self._keys, self._values)
        )
        forgotten = (M - self._seen).clamp(min=0) if self._can_forget else None
        memory = KeptMemory(keys, values, 0, M, forgotten)
        memory.positions = self._all_positions
        return memory

    def _replay(self, pick: Pick | None) -> None:
        if pick not in self._replays:
            self._replays[pick] = _recorded(
                lambda: self._step(pick), [self._place, self._seen, self._tokens]
            )
        self._replays[pick]()
        self._n_read += 1

    def _step(self, pick: Pick | None) -> None:
        """Read the tokens and, if there is one to choose, replace them by the next."""
        model = self._model
        # First: a token that is refused moves nothing.
        embed, tokens = model.embedding, self._tokens[:, None]
        is_adaptive = isinstance(embed, AdaptiveEmbedding)
        x = embed.in_fixed_shapes(tokens) if is_adaptive else embedded(embed, tokens)
        distance = (self._place - self._places) % self._size
        if self._reset_at is not None:
            self._seen.masked_fill_(self._tokens == self._reset_at, 0)
        self._seen.add_(1).clamp_(max=self._size)
        hidden = distance >= self._seen.clamp(max=self._limit)[:, None]
        newest = self._place[None] % self._size
        # Positions are kept farthest first.
        row = self._size - 1 - distance
        for n, layer in enumerate(model.layers):
            normalized = layer.attention_norm(x) if layer.norm_first else x
            q, *present = layer.attention.project(normalized)
            if layer.has_raw_queries:
                q = layer.attention.queries(x)
            self._put(n, newest, present)
            q = q[:, 0].to(self._keys[n].dtype)
            attended = self._attended(q, n, row, hidden)
            x = layer.finish(x, projected(layer.attention.o_proj, attended))
            if model.config.enhanced_recurrence:
                self._put(n, newest, layer.keys_and_values(x))
        if model.final_norm is not None:
            x = model.final_norm(x)
        self._hidden.copy_(x[:, 0])
        self._place.add_(1)
        if pick is not None:
            self._tokens.copy_(pick(self._hidden, self._numbers))

    def _put(self, n: int, place: Int[Tensor, "1"], present: Sequence[Tensor]) -> None:
        """Write the keys and values of a token into the ring of a layer."""
        for ring, new in zip((self._keys, self._values), present, strict=True):
            ring[n].index_copy_(2, place, new.permute(2, 0, 1, 3).to(ring[n].dtype))

    def _attended(
        self, q: Float[Tensor, "B H K"], n: int, row: Tensor, hidden: Tensor
    ) -> Float[Tensor, "B 1 D"]:
        r, content_bias, position_bias = (x.to(q.dtype) for x in self._positions[n][:3])
        distance_bias = self._positions[n].distance_bias
        scale = q.shape[2] ** -0.5
        by_content, by_position = (
            ((q + bias) * scale).transpose(0, 1) for bias in (content_bias, position_bias)
        )
        position = by_position @ r.permute(1, 2, 0)
        if distance_bias is not None:
            position = position + distance_bias.T[:, None].to(q.dtype) * scale
        score = (self._keys[n] @ by_content[..., None])[..., 0]
        score = (score + position.index_select(2, row)).masked_fill(hidden, -torch.inf)
        dtype = torch.promote_types(q.dtype, torch.float32)
        weight = score.softmax(-1, dtype=dtype).to(q.dtype)
        return (weight[:, :, None] @ self._values[n]).permute(1, 2, 0, 3).flatten(2)


def _in_ring(x: Float[Tensor, "H B M K"], size: int) -> Float[Tensor, "H B size K"]:
    # Zeros: what no stream sees yet is multiplied by zero.
    ring = x.new_zeros(*x.shape[:2], size, x.shape[3])
    ring[:, :, : x.shape[2]] = x
    return ring


def _recorded(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """Record a step for replay where that can be done; ``state`` is what it moves on."""
    if state[0].device.type != "cuda":
        return step
    before = [x.clone() for x in state]
    # Libraries set themselves up in the first calls, which cannot be recorded.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
            for x, old in zip(state, before, strict=True):
                x.copy_(old)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
