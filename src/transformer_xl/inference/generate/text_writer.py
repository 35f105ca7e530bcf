"""Incremental decoding of tokens to text."""

from collections.abc import Iterable, Iterator, Sequence

from transformer_xl.data import Vocab
from transformer_xl.errors import InputError
from transformer_xl.inference.generate.history import Tokens

_CONTEXT = 16
"""Tokens before a prompt that decide how what follows it is decoded: the whitespace before the
first word of a text, and the character of which a part was written before."""


class TextWriter:
    """Decodes tokens incrementally, up to the first of the ``stop`` strings.

    Text that may be the beginning of a stop string is held back. The ``prompt`` is not returned; it
    determines the whitespace before the first word. ``before`` has the tokens before the prompt, of
    which the last ones complete a character that they begin.

    Attributes:
        has_stopped: Whether a stop string was found.
        decoder: Decodes the tokens; it may hold the first bytes of a character.

    Raises:
        ValueError: A ``stop`` string is empty or no string.
    """

    def __init__(
        self,
        vocab: Vocab,
        stop: str | Sequence[str] = (),
        prompt: Iterable[int] = (),
        before: Tokens = (),
    ) -> None:
        # A str is a sequence of str, too.
        stop = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stop, Sequence) or not all(isinstance(each, str) for each in stop):
            raise InputError(f"stop={stop!r} must be a text, or several in a list")
        if not all(stop):
            raise InputError("a stop string is empty: every text would end before it begins")
        self.has_stopped = False
        self._stop, self._waiting = stop, ""
        self.decoder = vocab.stream_decoder()
        for token in (*map(int, before[-_CONTEXT:]), *prompt):
            self.decoder.push(token)

    def push(self, token: int) -> str:
        """Add a token; return the text that is final."""
        self._waiting += self.decoder.push(token)
        stops = [self._waiting.index(s) for s in self._stop if s in self._waiting]
        self.has_stopped = bool(stops)
        held = max((_overlap(self._waiting, s) for s in self._stop), default=0)
        ready = min(stops) if stops else len(self._waiting) - held
        text, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return text

    def pieces(self, tokens: Iterable[int], *, goes_on: bool = False) -> Iterator[str]:
        """Add tokens until a stop string is found; yield what they complete, where they do.

        If the text ``goes_on`` later, a character that is incomplete at the end is left to that.
        """
        for token in tokens:
            if text := self.push(token):
                yield text
            if self.has_stopped:
                return
        if text := self.held if goes_on else self.flush():
            yield text

    def flush(self) -> str:
        """Return the text that was held back, at the end."""
        return "" if self.has_stopped else self.held + self.decoder.flush()

    @property
    def held(self) -> str:
        """The text that is held back as it may be the beginning of a stop string."""
        return "" if self.has_stopped else self._waiting


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


def prompt_for(vocab: Vocab) -> str:
    """Return a prompt that the vocabulary can encode; some have no line break."""
    for text in ("\n", "The", "the", *vocab.symbols):
        try:
            if vocab.encode(text):
                return text
        except ValueError:
            continue
    return "\n"
