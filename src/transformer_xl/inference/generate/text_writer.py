"""Text out of tokens, as they come."""

from collections.abc import Iterable, Iterator, Sequence

from transformer_xl.data import Vocab
from transformer_xl.inference.generate.batch import GenerationBatch


class TextWriter:
    """Turns tokens into text as they come, up to the first of the ``stop`` strings.

    What might be the beginning of a stop string is held back until it is decided. The ``prompt``
    is not repeated; it decides what stands between it and the first word.

    Attributes:
        has_stopped: Whether a stop string came.

    Raises:
        ValueError: A ``stop`` string is empty: every text would end before it begins. Or it is no
            text.
    """

    def __init__(
        self, vocab: Vocab, stop: str | Sequence[str] = (), prompt: Iterable[int] = ()
    ) -> None:
        # A text is a sequence of texts, too: its letters.
        stop = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stop, Sequence) or not all(isinstance(each, str) for each in stop):
            raise ValueError(f"stop={stop!r} must be a text, or several in a list")
        if not all(stop):
            raise ValueError("a stop string is empty: every text would end before it begins")
        self.has_stopped = False
        self._stop, self._waiting = stop, ""
        self._decoder = vocab.stream_decoder()
        for token in prompt:
            self._decoder.push(token)

    def push(self, token: int) -> str:
        """Return the text that is certain with this token."""
        self._waiting += self._decoder.push(token)
        found = [self._waiting.index(s) for s in self._stop if s in self._waiting]
        self.has_stopped = bool(found)
        held = max((_overlap(self._waiting, s) for s in self._stop), default=0)
        ready = min(found) if found else len(self._waiting) - held
        text, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return text

    def flush(self) -> str:
        """Return what was held back, at the end of a text."""
        return "" if self.has_stopped else self._waiting + self._decoder.flush()


def text_pieces(
    tokens: Iterable[int],
    vocab: Vocab,
    stop: str | Sequence[str] = (),
    prompt: Iterable[int] = (),
) -> Iterator[str]:
    """Turn tokens into pieces of text, as :class:`TextWriter` does; end where it stops.

    Raises:
        ValueError: A ``stop`` string is empty.
    """
    # Not by the first piece, but now.
    return written(tokens, TextWriter(vocab, stop, prompt))


def written(tokens: Iterable[int], writer: TextWriter) -> Iterator[str]:
    """Hand tokens to a writer until it stops; yield the text that comes."""
    for token in tokens:
        if piece := writer.push(token):
            yield piece
        if writer.has_stopped:
            return
    yield writer.flush()


def batch_texts(
    batch: GenerationBatch,
    vocab: Vocab,
    stop: str | Sequence[str],
    prompts: Sequence[Sequence[int]],
) -> list[str]:
    """Draw a batch to its end; return the texts without their prompts."""
    writers = [TextWriter(vocab, stop, prompt) for prompt in prompts]
    texts = [""] * len(prompts)
    for tokens in batch:
        for n, token in tokens.items():
            texts[n] += writers[n].push(token)
            if writers[n].has_stopped:
                batch.end(n)
    return [text + writer.flush() for text, writer in zip(texts, writers, strict=True)]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text that begins ``stop``."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
