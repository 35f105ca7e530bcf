"""Vocabularies of old programs, with their rules for tokenization and detokenization.

The tokenization is in the ``tokenizers`` file. The rules for joining tokens, and the special
tokens, are in ``vocab.json`` as `Rules`.
"""

import dataclasses
import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from transformer_xl.data.tokenizer_trial import tried
from transformer_xl.data.vocab import UNDECODED, StreamDecoder, Vocab, bytes_written, no_symbol

Join = Literal["bytes", "chars", "words", "moses"]
LineEnds = Literal["none", "after", "around"]

# Whitespace of str.split(); Oniguruma's \s lacks the separators of ASCII.
SPACE = r"\s\x1c-\x1f\x85"


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

    def __post_init__(self) -> None:
        texts = (self.eos, self.unk)
        right = self.join in get_args(Join) and self.line_ends in get_args(LineEnds)
        right = right and all(x is None or isinstance(x, str) for x in texts)
        right = right and all(isinstance(x, str) for x in self.apart)
        if not right or not isinstance(self.clean_up, bool):
            raise ValueError(f"invalid rules of a vocabulary: {self}")

    def to_json(self) -> dict[str, Any]:
        """Return the entry of ``vocab.json``."""
        return dataclasses.asdict(self) | {"apart": list(self.apart)}


def cutter(symbols: Sequence[str], rules: Rules, steps: Sequence[Any]) -> Tokenizer:
    """Build a tokenizer for the tokens of an old program, with IDs in their order.

    Args:
        symbols: The tokens.
        rules: Its rules for joining them.
        steps: Normalizers applied first.
    """
    ids = {symbol: number for number, symbol in enumerate(symbols)}
    # An unknown word is an error if unk_token is not in the vocabulary.
    missing = next(x for x in map(chr, range(0xD800)) if x not in ids)
    unk = missing if rules.unk is None else rules.unk
    tokenizer: Any = Tokenizer(models.WordLevel(vocab=ids, unk_token=unk))
    cut: Any = pre_tokenizers.Split(Regex(f"[{SPACE}]+"), "removed")
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
    return tokenizer


class ImportedVocab(Vocab):
    """The vocabulary of an old program.

    Attributes:
        rules: Its rules for joining tokens.
    """

    def __init__(self, definition: str, rules: Rules) -> None:
        """Read the text of a ``tokenizer.json``."""
        self.rules = rules
        super().__init__("imported", definition)
        self.hash = _hash(definition.encode(), rules.to_json())
        self.eos_id, self.unk_id = self._id("eos", rules.eos), self._id("unk", rules.unk)
        if self.token_bytes is not None and self.unk_id is not None:
            self.token_bytes[self.unk_id] = 0
        if rules.line_ends != "none" and self.eos_id is None:
            raise ValueError(f"line_ends={rules.line_ends!r} needs an eos symbol, and eos is None")

    @staticmethod
    def load(folder: Path, definition: bytes, about: dict[str, Any]) -> "ImportedVocab":
        """Read the vocabulary of a folder, whose ``vocab.json`` holds ``about``."""
        problem = f"{folder / 'tokenizer.json'} or vocab.json beside it is damaged or was edited"
        rules = about.get("rules")
        if not isinstance(rules, dict) or _hash(definition, rules) != about["hash"]:
            raise RuntimeError(f"{problem}: they do not match the hash; restore them from a copy")
        try:
            settings: dict[str, Any] = rules | {"apart": tuple(rules.get("apart", ()))}
            return ImportedVocab(tried(definition), Rules(**settings))
        except Exception as error:  # tokenizers has no class of its own.
            raise RuntimeError(f"{problem} ({error}); restore them from a copy") from error

    def _id(self, role: str, symbol: str | None) -> int | None:
        if symbol is not None and symbol not in self._ids:
            raise ValueError(f"{role}={symbol!r} is no symbol of the vocabulary")
        return None if symbol is None else self._ids[symbol]

    def _symbol_bytes(self) -> list[bytes] | None:
        if self.rules.join == "bytes":
            return bytes_written(self.symbols)
        if self.rules.join == "chars":
            return [symbol.encode() for symbol in self.symbols]
        return None

    def _about(self) -> dict[str, object]:
        return {"rules": self.rules.to_json()}

    def encode(self, text: str) -> list[int]:
        """Encode a text as the old program did."""
        if self.unk_id is not None:
            return self._token_ids(text)
        try:
            return self._token_ids(text)
        except Exception:  # tokenizers has no class of its own for this.
            unknown = self.unknown(text)
            if not unknown:
                raise
        raise self.refusal(unknown, self.first_unknown_line(text))

    def _about_symbols(self) -> str:
        return f"imported vocabulary of {len(self):,} symbols"

    def unknown(self, text: str) -> Counter[str]:
        """Count the unknown symbols of a text."""
        undecoded = UNDECODED.findall(text)
        pieces = self._pieces(UNDECODED.sub("", text) if undecoded else text)
        unknown = [x for x in pieces if x not in self._ids]
        if self.rules.join == "bytes":
            unknown = map(repr, bytes_written(unknown))
        return Counter([*undecoded, *unknown])

    def _pieces(self, text: str) -> list[str]:
        if (normalizer := self._tokenizer.normalizer) is not None:
            text = normalizer.normalize_str(text)
        cutter = self._tokenizer.pre_tokenizer
        return [text] if cutter is None else [x for x, _ in cutter.pre_tokenize_str(text)]

    def _encode_without_unknown(self, text: str) -> list[int]:
        return self._encode_by_line(
            text, lambda line: [self._ids[x] for x in self._pieces(line) if x in self._ids]
        )

    def encode_lines(self, text: str, *, prepared: bool = False) -> list[int]:
        """Encode the text of a file; ``eos`` ends each line.

        A ``prepared`` text is split at spaces alone.
        """
        if prepared and self.rules.join == "moses":
            return self._encode_by_line(text, self._encode_words, always=True)
        return self._encode_by_line(text, self.encode)

    def _encode_by_line(
        self, text: str, cut: Callable[[str], list[int]], *, always: bool = False
    ) -> list[int]:
        if not always and (self.rules.line_ends != "none" or self.eos_id is None):
            return cut(text)
        lines = re.split(r"\r\n?|\n", text)
        if not lines[-1]:
            lines.pop()
        ends = [] if self.eos_id is None else [self.eos_id]
        return [token for line in lines for token in (*cut(line), *ends)]

    def _encode_words(self, line: str) -> list[int]:
        words = line.split()
        if self.unk_id is not None:
            return [self._ids.get(word, self.unk_id) for word in words]
        unknown = [word for word in words if word not in self._ids]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not in the vocabulary, which has no <unk>")
        return [self._ids[word] for word in words]

    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder that takes one token at a time, starting at the beginning of a line."""
        if self._bytes is not None:
            return super().stream_decoder()
        return WordDecoder(self.symbols, self.rules)


def _hash(definition: bytes, rules: dict[str, Any]) -> str:
    about = json.dumps(rules, sort_keys=True)
    return hashlib.sha256(f"imported\n{about}\n".encode() + definition).hexdigest()


class WordDecoder(StreamDecoder):
    """Decodes words one at a time."""

    def __init__(self, symbols: list[str], rules: Rules) -> None:
        super().__init__("imported", symbols, None)
        self._rules = rules
        self._joiner = _Moses(rules) if rules.join == "moses" else _Spaces()
        self._is_open = False

    def push(self, token: int) -> str:
        """Decode one token; return the text that it completes."""
        if not 0 <= token < len(self._symbols):
            raise no_symbol(token, len(self._symbols))
        symbol = self._symbols[token]
        if symbol != self._rules.eos or self._rules.line_ends == "none":
            self._is_open = True
            return self._joiner.push(symbol)
        if self._rules.line_ends == "around" and not self._is_open:
            self._is_open = True
            return ""
        self._is_open = False
        return self._joiner.end() + "\n"

    def flush(self) -> str:
        """End the text."""
        return self._joiner.end()


class _Spaces:
    """Joins words by spaces."""

    _space = ""

    def push(self, symbol: str) -> str:
        text, self._space = self._space + symbol, " "
        return text

    def end(self) -> str:
        self._space = ""
        return ""


_ENTITIES = {
    "&bar;": "|",
    "&#124;": "|",
    "&lt;": "<",
    "&gt;": ">",
    "&bra;": "[",
    "&ket;": "]",
    "&quot;": '"',
    "&apos;": "'",
    "&#91;": "[",
    "&#93;": "]",
    "&amp;": "&",
}
# A space before these is removed, for ' on both sides.
_CLEANED = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'")),
    *((" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
_BEGINS_CLEANED = (" '", " n")
_MARKS = re.compile(r"[,.?!:;\\%})\]]+")
_QUOTES = re.compile(r"""['"„“`]+""")
_IN_NUMBERS = ((" @,@ ", ","), (" @.@ ", "."))
_BEGINS_IN_NUMBER = re.compile("(?: @[,.]@)+")
# Characters written without spaces between words.
_SPACELESS = re.compile(
    "[\u1100-\u11ff\u2e80-\ua4cf\ua840-\ua87f\uac00-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff65-\uffdc"
    "\U00017000-\U00018aff\U0001b000-\U0001b12f\U0001b170-\U0001b2ff\U00020000-\U0002ffff]"
)


def _join_numbers(text: str) -> str:
    for mark, character in _IN_NUMBERS:
        text = text.replace(mark, character)
    return text


class _Moses:
    """Joins words by the Moses rules for English, and the parts of numbers.

    A word is returned at once, unless the original might join it with later words. Results differ
    if ``@-@`` follows punctuation, which Moses never produces.
    """

    def __init__(self, rules: Rules) -> None:
        self._apart = frozenset(rules.apart)
        self._clean_up = rules.clean_up
        self._line = ""
        self._held = ""
        self._begin()

    def _begin(self) -> None:
        """Drop the state: the next word begins a part of the line."""
        self._word = ""
        self._space = " "
        self._quotes: Counter[str] = Counter()
        self._glued = False

    def end(self) -> str:
        """End a line; return the pending text."""
        held, self._line, self._held = self._held, "", ""
        self._begin()
        return _join_numbers(held)

    def push(self, symbol: str) -> str:
        """Decode one token; return the text that it completes."""
        if symbol in self._apart:
            held, self._held = _join_numbers(self._held), ""
            self._begin()
            return self._write(held, f" {symbol}")
        if "&" in symbol:
            for entity, character in _ENTITIES.items():
                symbol = symbol.replace(entity, character)
        return "".join([self._push_word(word) for word in symbol.split()])

    def _push_word(self, word: str) -> str:
        begins, held, self._held = not self._word, self._held, ""
        if self._glued or word == "@-@":
            # The hyphen and the word after it are joined to the word before.
            text = word if self._glued else "-"
            self._glued = not self._glued
            self._word += text
            self._space = " "
        else:
            text = self._shift(word)
            self._word = word
        if begins:
            return self._write(held, " " + text.lstrip())
        if _BEGINS_IN_NUMBER.fullmatch(held):
            held, text = "", held + text
        if _BEGINS_IN_NUMBER.fullmatch(text):
            self._held = text
            return held
        return self._write(held, _join_numbers(text))

    def _write(self, held: str, text: str) -> str:
        """Append text to the pending text; return the part that is final."""
        if not self._line:
            text = text.removeprefix(" ")
        elif self._clean_up:
            text = held + text
            for mark, cleaned in _CLEANED:
                text = text.replace(mark, cleaned)
            if text in _BEGINS_CLEANED:
                self._held, text = text, ""
        else:
            text = held + text
        self._line = self._line or text
        return text

    def _shift(self, word: str) -> str:
        """Return a word with its leading space, if any, and decide on the next space."""
        space, self._space = self._space, " "
        if _SPACELESS.match(word):
            follows = self._word and _SPACELESS.match(self._word[-1])
            return word if follows else space + word
        if all(c in "([{¿¡" or unicodedata.category(c) == "Sc" for c in word):
            self._space = ""
            return space + word
        is_short_form = self._word and word[0] == "'" and word[1:2].isalpha()
        if _MARKS.fullmatch(word) or is_short_form:
            return word
        if not _QUOTES.fullmatch(word):
            return space + word
        quote = '"' if set(word) <= set("„“") else word
        if self._quotes[quote] % 2 == 0:
            if word == "'" and self._word.endswith("s"):
                return word
            self._space = ""
            self._quotes[quote] += 1
            return space + word
        self._quotes[quote] += 1
        return word
