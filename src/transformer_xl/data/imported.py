"""Vocabularies of old programs, with their rules for tokenization and detokenization.

The tokenization is in the ``tokenizers`` file. The rules for joining tokens, and the special
tokens, are in ``vocab.json`` as `Rules`.
"""

import dataclasses
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from transformer_xl.data.decoding import StreamDecoder
from transformer_xl.data.vocab import (
    MISSING,
    UNDECODED,
    Vocab,
    byte_characters,
    bytes_written,
    definition_hash,
)
from transformer_xl.errors import DataError

Join = Literal["bytes", "chars", "words", "moses"]
LineEnds = Literal["none", "after", "around"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules that are not in the ``tokenizers`` file."""

    join: Join
    """How tokens are joined: as bytes, as characters, as words separated by spaces, or by the Moses
    rules for English."""
    line_ends: LineEnds = "none"
    """Position of ``eos``: after each line, around each line, or none."""
    eos: str | None = None
    """The token that ends a line."""
    unk: str | None = None
    """The token for unknown symbols; without one, they are an error."""
    apart: tuple[str, ...] = ()
    """Moses: tokens that separate the words before them from those after them."""
    clean_up: bool = False
    """Moses: whether spaces before punctuation and contractions are removed as well."""

    @property
    def line_end(self) -> str | None:
        """The token that ends a line in a text, if any."""
        return None if self.line_ends == "none" else self.eos

    def to_json(self) -> Mapping[str, object]:
        """Return the entry of ``vocab.json``."""
        return dataclasses.asdict(self) | {"apart": list(self.apart)}


class ImportedVocab(Vocab):
    """The vocabulary of an old program.

    Attributes:
        rules: Its rules for joining tokens.
    """

    SPACE: ClassVar[str] = r"\s\x1c-\x1f\x85"
    """Whitespace of str.split(); Oniguruma's \\s lacks the separators of ASCII."""

    def __init__(self, definition: str, rules: Rules) -> None:
        """Read the text of a ``tokenizer.json``."""
        self.rules = rules
        super().__init__("imported", definition)
        self.hash = definition_hash("imported", definition.encode(), rules.to_json())
        if not {rules.eos, rules.unk} <= {None, *self._ids}:
            raise DataError(f"{rules} names a symbol that the vocabulary lacks")
        self.eos_id = None if rules.eos is None else self._ids[rules.eos]
        self.unk_id = None if rules.unk is None else self._ids[rules.unk]
        if self.token_bytes is not None and self.unk_id is not None:
            self.token_bytes[self.unk_id] = 0

    @classmethod
    def of(
        cls,
        symbols: Sequence[str],
        rules: Rules,
        steps: Sequence[normalizers.Normalizer],
        added: Sequence[AddedToken] = (),
    ) -> "ImportedVocab":
        """Build the vocabulary of the tokens of an old program, with IDs in their order.

        Args:
            symbols: The tokens.
            rules: The rules for joining them.
            steps: Applied to a text first.
            added: Tokens that are matched before the text is split.
        """
        ids = {symbol: number for number, symbol in enumerate(symbols)}
        # An unknown word is an error if unk_token is not in the vocabulary.
        missing = next(x for x in map(chr, range(0xD800)) if x not in ids)
        unk = missing if rules.unk is None else rules.unk
        tokenizer: Any = Tokenizer(models.WordLevel(vocab=ids, unk_token=unk))
        cut: Any = pre_tokenizers.Split(Regex(f"[{cls.SPACE}]+"), "removed")
        if rules.join in ("bytes", "chars"):
            cut = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        if rules.join == "bytes":
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            cut = pre_tokenizers.Sequence([byte_level, cut])
            tokenizer.decoder = decoders.ByteLevel()
        elif rules.join == "chars":
            tokenizer.decoder = decoders.Fuse()
        tokenizer.normalizer = normalizers.Sequence([*steps])
        tokenizer.pre_tokenizer = cut
        tokenizer.add_tokens([*added])
        return cls(tokenizer.to_str(pretty=True), rules)

    @classmethod
    def of_bytes(cls, values: Sequence[int]) -> "ImportedVocab":
        """Build the authors' vocabulary of enwik8 from the values of its bytes, in order.

        A line break that is not among them is left out of texts, as by ``prep_enwik8.py``, which
        wrote the values as words, and a line end, without a token, for each line break.
        """
        characters = byte_characters()
        dropped = normalizers.Sequence([normalizers.Replace(Regex(r"\n"), "")])
        steps = [] if ord("\n") in values else [dropped]
        return cls.of([characters[x] for x in values], Rules(join="bytes"), steps)

    def _symbol_bytes(self) -> list[bytes] | None:
        if self.rules.join == "bytes":
            return self._byte_level()
        if self.rules.join == "chars":
            return [symbol.encode() for symbol in self.symbols]
        return None

    def _with_definition(self, definition: str) -> Vocab:
        return ImportedVocab(definition, self.rules)

    def _about(self) -> dict[str, object]:
        return {"rules": self.rules.to_json()}

    def _about_symbols(self) -> str:
        return f"imported vocabulary of {len(self):,} symbols"

    def _lookup(self, text: str) -> np.ndarray:
        try:
            return super()._lookup(text)
        except Exception:  # tokenizers has no class of its own for an unknown symbol.
            if self.unk_id is not None or not self.unknown(text):
                raise
        symbols = [*UNDECODED.findall(text), *self._pieces(text)]
        return np.array([self._ids.get(x, MISSING) for x in symbols], dtype=np.int64)

    def unknown(self, text: str) -> Counter[str]:
        """Count the unknown symbols of a text."""
        unknown = [x for x in self._pieces(text) if x not in self._ids]
        if self.rules.join == "bytes":
            unknown = map(repr, bytes_written(unknown))
        return Counter([*UNDECODED.findall(text), *unknown])

    def _pieces(self, text: str) -> list[str]:
        text = UNDECODED.sub("", text)
        if (normalizer := self.tokenizer.normalizer) is not None:
            text = normalizer.normalize_str(text)
        cutter = self.tokenizer.pre_tokenizer
        return [text] if cutter is None else [x for x, _ in cutter.pre_tokenize_str(text)]

    def _lookup_lines(self, text: str, *, prepared: bool = False) -> np.ndarray:
        """Look up the text of a file; ``eos`` ends each line. One is given where none is cut."""
        are_words = prepared and self.rules.join == "moses"
        if not are_words and (self.rules.line_ends != "none" or self.eos_id is None):
            return self._lookup(text)
        lines = re.split(r"\r\n?|\n", text)
        if not lines[-1]:
            lines.pop()
        missing = MISSING if self.unk_id is None else self.unk_id
        ids: list[int] = []
        for line in lines:
            words = (self._ids.get(word, missing) for word in line.split())
            ids += words if are_words else self._lookup(line).tolist()
            ids += [] if self.eos_id is None else [self.eos_id]
        return np.array(ids, dtype=np.int64)

    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder that takes one token at a time, starting at the beginning of a line."""
        if self._bytes is not None:
            return super().stream_decoder()
        if self.rules.join == "moses":
            return _MosesDecoder(self.symbols, self.rules)
        around = self.rules.line_ends == "around"
        return StreamDecoder(self.symbols, None, self.rules.line_end, around=around)


_NAMES = "&bar; &#124; &lt; &gt; &bra; &ket; &quot; &apos; &#91; &#93; &amp;"
_ENTITIES = tuple(zip(_NAMES.split(), "||<>[]\"'[]&", strict=True))
# Spaces before punctuation and contractions are removed; an apostrophe loses both.
_CLEANED = re.compile(r" (?=[.?!,]|n't|'(?:m|s|ve|re))| (') ")
# What may join numbers, as the next word decides.
_UNDECIDED = re.compile(r"(?: '| n)?(?: @[,.]@)+")
_MARKS = re.compile(r"[,.?!:;\\%})\]]+")
_QUOTES = re.compile(r"""['"„“`]+""")
# Characters written without spaces between words.
_SPACELESS = re.compile(
    "[\u1100-\u11ff\u2e80-\ua4cf\ua840-\ua87f\uac00-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff65-\uffdc"
    "\U00017000-\U00018aff\U0001b000-\U0001b12f\U0001b170-\U0001b2ff\U00020000-\U0002ffff]"
)


def _join_numbers(text: str) -> str:
    return text.replace(" @,@ ", ",").replace(" @.@ ", ".")


class _MosesDecoder(StreamDecoder):
    """Joins words by the Moses rules for English, and the parts of numbers.

    A word is returned at once, unless the original might join it with later words. Results differ
    if ``@-@`` follows punctuation, which Moses never produces.
    """

    def __init__(self, symbols: list[str], rules: Rules) -> None:
        around = rules.line_ends == "around"
        super().__init__(symbols, None, rules.line_end, around=around)
        self._rules, self._held, self._has_text = rules, "", False
        self._begin()

    def _begin(self) -> None:
        """Drop the state: the next word begins a part of the line."""
        self._word, self._space, self._is_glued = "", " ", False
        self._quotes: Counter[str] = Counter()

    def flush(self) -> str:
        """End a line; return the pending text."""
        held, self._held, self._has_text = self._held, "", False
        self._begin()
        return _join_numbers(held)

    def fork(self) -> "_MosesDecoder":
        """See :meth:`StreamDecoder.fork`."""
        other = cast("_MosesDecoder", super().fork())
        other._quotes = self._quotes.copy()
        return other

    def _join(self, word: str) -> str:
        if word in self._rules.apart:
            self._begin()
            return self._write(_join_numbers(self._held) + f" {word}")
        for entity, character in _ENTITIES:
            word = word.replace(entity, character)
        return "".join([self._push_word(part) for part in word.split()])

    def _push_word(self, word: str) -> str:
        is_first = not self._word
        if self._is_glued or word == "@-@":
            # The hyphen and the word after it are joined to the word before.
            text = word if self._is_glued else "-"
            self._is_glued, self._space = not self._is_glued, " "
            self._word += text
        else:
            text, self._word = self._spaced(word), word
        text = self._held + (f" {text.lstrip()}" if is_first else text)
        if not is_first and _UNDECIDED.fullmatch(text):
            self._held = text
            return ""
        return self._write(text if is_first else _join_numbers(text))

    def _write(self, text: str) -> str:
        """Return the part of a text that is final."""
        self._held = ""
        if not self._has_text:
            text = text.removeprefix(" ")
        elif self._rules.clean_up:
            text = _CLEANED.sub(r"\1", text)
            if text in (" '", " n"):
                text, self._held = "", text
        self._has_text = self._has_text or bool(text)
        return text

    def _spaced(self, word: str) -> str:
        """Return a word with its leading space, if any, and decide on the next space."""
        space, self._space = self._space, " "
        if _SPACELESS.match(word):
            return word if self._word and _SPACELESS.match(self._word[-1]) else space + word
        if all(c in "([{¿¡" or unicodedata.category(c) == "Sc" for c in word):
            self._space = ""
            return space + word
        is_short_form = self._word and word[0] == "'" and word[1:2].isalpha()
        if is_short_form or _MARKS.fullmatch(word):
            return word
        if _QUOTES.fullmatch(word):
            quote = '"' if set(word) <= set("„“") else word
            is_open = self._quotes[quote] % 2 == 1
            if not is_open and word == "'" and self._word.endswith("s"):
                return word
            self._quotes[quote] += 1
            self._space = " " if is_open else ""
            return word if is_open else space + word
        return space + word
