"""Writing text: one token at a time, at a cost that does not grow."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from transformer_xl.config import FORMAT_VERSION
from transformer_xl.data import Vocab
from transformer_xl.files import checksum, write_atomically
from transformer_xl.nn import AdaptiveSoftmax, KeptMemory, Memory, Softmax, TransformerXL

# Reading a prompt in pieces bounds the memory it takes, whatever its length.
_PROMPT_SEGMENT = 512


class Generation(Iterator[int]):
    """Tokens drawn from a model, and the memory behind them.

    Iterating draws token after token. At any moment ``mems`` has read the prompt and all tokens
    drawn so far but the last, which is ``last_token``: ``generate(model, [g.last_token],
    mems=g.mems)`` goes on where this one is.
    """

    def __init__(
        self,
        model: TransformerXL,
        ids: Sequence[int],
        length: int | None,
        mems: Memory | KeptMemory | None,
        sampler: "Sampler",
        mem_len: int | None,
    ) -> None:
        self._model, self._left, self._sampler, self._mem_len = model, length, sampler, mem_len
        if mems is None:
            mems = model.start_memory(1, mem_len)
        self.mems = model.keep(mems) if isinstance(mems, Memory) else mems
        self._unread = list(ids)
        self.last_token = self._unread[-1]

    @torch.no_grad()
    def __next__(self) -> int:
        if self._left == 0:
            raise StopIteration
        hidden, mems = self._read()
        token = self._sampler(self._model.softmax, hidden[0, -1])
        # All at once: an interrupt before this line leaves a memory that can be gone on from.
        self.mems, self._unread, self.last_token = mems, [token], token
        if self._left is not None:
            self._left -= 1
        return token

    def _read(self) -> tuple[Float[Tensor, "1 T D"], Memory | KeptMemory]:
        device = self._model.device
        hidden, mems = None, self.mems
        for start in range(0, len(self._unread), _PROMPT_SEGMENT):
            segment = torch.tensor([self._unread[start : start + _PROMPT_SEGMENT]], device=device)
            # What is read is remembered; nothing is read again.
            hidden, mems = self._model.read(segment, mems, mem_len=self._mem_len, ext_len=0)
        assert hidden is not None
        return hidden, mems


class Sampler:
    """Draws a token from a distribution."""

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, seed: int | None
    ) -> None:
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        # Drawn on the processor: the same distribution gives the same token wherever it was made.
        self.generator = torch.Generator()
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def __call__(self, softmax: Softmax | AdaptiveSoftmax, hidden: Float[Tensor, " D"]) -> int:
        """Draw a token; of an adaptive softmax, most often without its rarer clusters."""
        if self.temperature == 0:
            return int(softmax.top_k(hidden, 1)[1])
        if self.top_k is not None:
            values, tokens = softmax.top_k(hidden, self.top_k)
        elif self.temperature == 1 and self.top_p is None:
            return softmax.draw(hidden, self.generator)
        else:
            values, tokens = softmax.log_probs(hidden).sort(descending=True)
        probs = (values.float().cpu() / self.temperature).softmax(-1)
        if self.top_p is not None:
            # A token stays while those likelier than it do not reach top_p together.
            probs = probs * (probs.cumsum(-1) - probs < self.top_p)
        return int(tokens[torch.multinomial(probs, 1, generator=self.generator)])


def generate(
    model: TransformerXL,
    ids: Sequence[int] | Int[Tensor, " length"],
    *,
    length: int | None = None,
    mems: Memory | KeptMemory | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    mem_len: int | None = None,
) -> Generation:
    """Continue a text, token by token.

    Time and memory for each token stay the same for as long as one goes on.

    Args:
        model: The model; it should be in evaluation mode.
        ids: The prompt in tokens, at least one.
        length: How many tokens to draw. None: without end.
        mems: The memory of one stream to begin with. None: as at the start of a text.
        temperature: Below 1 safer, above 1 wilder; 0 takes the likeliest token.
        top_k: Draw from the ``top_k`` likeliest tokens only.
        top_p: Draw from the fewest likeliest tokens that have this probability together.
        seed: Seed of the draw. None: a different one each time.
        mem_len: Remembered positions. None: as the model is configured.

    Returns:
        An iterator over the new tokens, with the memory in its ``mems``.

    Raises:
        ValueError: The prompt is empty or has unknown tokens, or a setting is out of range.
    """
    ids = [int(token) for token in ids]
    if not ids:
        raise ValueError("the prompt is empty: give at least one token to continue")
    unknown = [token for token in ids if not 0 <= token < model.config.vocab_size]
    if unknown:
        raise ValueError(
            f"token {unknown[0]} of the prompt is outside the vocabulary of "
            f"{model.config.vocab_size}"
        )
    if mems is not None and mems.batch_size != 1:
        raise ValueError(f"mems holds {mems.batch_size} streams; select one: mems.select([0])")
    if length is not None and length < 0:
        raise ValueError(f"length={length} must be at least 0, or None for no end")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must be at least 0")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1")
    sampler = Sampler(temperature, top_k, top_p, seed)
    return Generation(model, ids, length, mems, sampler, mem_len)


def text_pieces(
    tokens: Iterator[int], vocab: Vocab, stop: Sequence[str] = (), prompt: Sequence[int] = ()
) -> Iterator[str]:
    """Turn tokens into text as they come; end before the first of the ``stop`` strings.

    What might be the beginning of a stop string is held back until it is decided. The ``prompt``
    is not repeated; it decides what stands between it and the first word.

    Raises:
        ValueError: A ``stop`` string is empty: every text would end before it begins.
    """
    if not all(stop):
        raise ValueError("a stop string is empty: every text would end before it begins")
    decoder = vocab.stream_decoder()
    for token in prompt:
        decoder.push(token)
    waiting = ""
    for token in tokens:
        waiting += decoder.push(token)
        found = [waiting.index(s) for s in stop if s in waiting]
        if found:
            yield waiting[: min(found)]
            return
        held = max((_overlap(waiting, s) for s in stop), default=0)
        ready = len(waiting) - held
        if ready:
            yield waiting[:ready]
            waiting = waiting[ready:]
    yield waiting + decoder.flush()


def save_state(path: Path, generation: Generation, weights: Path) -> None:
    """Write the memory behind a text to a safetensors file, atomically.

    Args:
        path: The file.
        generation: What was written so far.
        weights: The weights file of the model, to which the memory belongs.
    """
    state = generation.mems.state_dict()
    tensors = {name: x.contiguous() for name, x in state.items() if x is not None}
    about = {
        "format_version": str(FORMAT_VERSION),
        "last_token": str(generation.last_token),
        "weights": checksum(weights),
    }
    write_atomically(path, lambda temporary: save_file(tensors, temporary, about))


def load_state(path: Path, weights: Path) -> tuple[Memory | KeptMemory, int]:
    """Read a memory and the last token behind it, which the memory has not read yet.

    Raises:
        RuntimeError: The file is damaged or of a newer version.
        ValueError: The memory belongs to another model.
    """
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        version, belongs_to = int(about["format_version"]), about["weights"]
        last_token = int(about["last_token"])
        kind = Memory if "states" in state else KeptMemory
        memory = kind.from_state_dict({"forgotten": None, **state})
    except (SafetensorError, KeyError, ValueError, IndexError) as error:
        raise RuntimeError(f"{path} is damaged or holds no memory: {error}") from error
    if version > FORMAT_VERSION:
        raise RuntimeError(
            f"{path} has format {version}; this version reads up to {FORMAT_VERSION}: "
            "update transformer_xl"
        )
    if belongs_to != checksum(weights):
        raise ValueError(f"the memory in {path} was made by another model than {weights}")
    return memory, last_token


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text that begins ``stop``."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
