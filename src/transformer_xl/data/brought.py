"""Tokenizers that are there already: another program's, or the vocabulary of a model folder.

A ``tokenizer.json`` is kept as it is. A SentencePiece model is written as one: its pieces and
scores, its table of normal forms, its rules for blanks (Kudo and Richardson 2018).
"""

import struct
from collections.abc import Iterator
from typing import Any, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from transformer_xl.data.vocab import StreamDecoder, Vocab, byte_characters


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field: an integer, or the bytes of anything else.

    Raises:
        ValueError: This is no message, or not all of it.
    """
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError("this is no message in the protocol-buffer encoding")
        if at + length > len(message):
            raise ValueError("the message ends too early")
        yield key >> 3, message[at : at + length]
        at += length


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Read the integer that begins at a place; return it and where it ends.

    Raises:
        ValueError: It has no end.
    """
    value = 0
    for i, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, at + i + 1
    raise ValueError("a number in the message has no end")


_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
_NEVER = -1e4
_UNIGRAM, _BPE = 1, 2
_UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_BLANK = "\u2581"


class BroughtVocab(Vocab):
    """The tokenizer of another program.

    Where it treats the beginning of a text in its own way or takes a line end for a blank, as
    SentencePiece does, each line is a text, and its symbol for the end of a text ends the line.
    """

    def __init__(self, definition: str) -> None:
        """Read the text of a ``tokenizer.json``.

        Raises:
            ValueError: Its numbers have gaps, or lines cannot be told apart.
        """
        super().__init__("brought", definition)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.eos_id = next((self._ids[x] for x in _ENDS if x in self._ids), None)
        # Its own way with beginnings, or a line end that is a blank as any other.
        two_lines = self._cut("a\na")
        starts_anew = two_lines != [*self._cut("a"), *self._cut("\na")]
        self._by_line = starts_anew or two_lines == self._cut("a a")
        if self._by_line and self.eos_id is None:
            raise ValueError(
                "the tokenizer cuts a text by lines and has no symbol for their end (one of "
                f"{', '.join(_ENDS)}): lines could not be told apart"
            )

    def _symbol_bytes(self) -> list[bytes] | None:
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        if not isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            return None
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        return [
            b"" if symbol in added else bytes(byte_of[character] for character in symbol)
            for symbol in self.symbols
        ]

    def _cut(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode(self, text: str) -> list[int]:
        """Cut a text into symbols as the other program does."""
        if not self._by_line or self.eos_id is None:
            return self._cut(text)
        # What follows the last line end is a line that goes on.
        *lines, rest = text.split("\n")
        ids = [token for line in lines for token in (*self._cut(line), self.eos_id)]
        return ids + (self._cut(rest) if rest else [])

    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder that takes one symbol at a time, at the beginning of a line."""
        if self._bytes is not None:
            return super().stream_decoder()
        return _Decoder(self._tokenizer, self.symbols, self.eos_id if self._by_line else None)


class _Decoder(StreamDecoder):
    """Writes the symbols of a tokenizer that joins them by rules of its own."""

    def __init__(self, tokenizer: Tokenizer, symbols: list[str], line_end: int | None) -> None:
        super().__init__("brought", symbols, None)
        self._tokenizer, self._line_end = tokenizer, line_end
        self._stream = decoders.DecodeStream(skip_special_tokens=True)

    def push(self, token: int) -> str:
        if token == self._line_end:
            self._stream = decoders.DecodeStream(skip_special_tokens=True)
            return "\n"
        return self._stream.step(self._tokenizer, token) or ""

    def flush(self) -> str:
        return ""


def from_sentencepiece(data: bytes) -> str:
    """Write a SentencePiece model as a ``tokenizer.json``."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normal: dict[int, Any] = {}
    for number, value in fields(data):
        if number == 1:
            piece = dict(fields(value))
            score = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
            pieces.append((piece[1].decode(), score, piece.get(3, 1)))
        elif number == 2:
            trainer = dict(fields(value))
        elif number == 3:
            normal = dict(fields(value))
    unknown = next((n for n, x in enumerate(pieces) if x[2] == _UNKNOWN), None)
    if not pieces or unknown is None:
        raise ValueError("a SentencePiece model has pieces, and one of them is the unknown")
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise ValueError(f"the SentencePiece model is neither unigram (1) nor BPE (2), but {kind}")
    has_bytes = any(x[2] == _BYTE for x in pieces)
    # What is a symbol but no text is never found in a text.
    hidden = {_CONTROL, _UNUSED}
    if kind == _UNIGRAM:
        scored = [(name, _NEVER if x in hidden else score) for name, score, x in pieces]
        tokenizer = Tokenizer(models.Unigram(scored, unk_id=unknown, byte_fallback=has_bytes))
    else:
        tokenizer = Tokenizer(
            models.BPE(
                vocab={name: n for n, (name, _, _) in enumerate(pieces)},
                merges=_merges([x for x in pieces if x[2] not in hidden]),
                unk_token=pieces[unknown][0],
                fuse_unk=True,
                byte_fallback=has_bytes,
            )
        )
    _set_blanks(tokenizer, trainer, normal)
    special = [AddedToken(x[0], special=True, normalized=False) for x in pieces if x[2] == _CONTROL]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(x[0], normalized=False) for x in pieces if x[2] == _USER])
    return tokenizer.to_str(pretty=True)


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Return the pairs that were joined, best first, which the model tells by its scores."""
    order = {name: n for n, (name, _, _) in enumerate(pieces)}
    found = []
    for name, score, _ in pieces:
        pairs = [(name[:n], name[n:]) for n in range(1, len(name))]
        pairs = [(a, b) for a, b in pairs if a in order and b in order]
        found += [
            (-score, *sorted_pair)
            for sorted_pair in sorted(pairs, key=lambda p: (order[p[0]], order[p[1]]))
        ]
    found.sort(key=lambda x: x[0])
    return [(a, b) for _, a, b in found]


def _set_blanks(tokenizer: Tokenizer, trainer: dict[int, Any], normal: dict[int, Any]) -> None:
    steps: list[Any] = [normalizers.Precompiled(normal[2])] if normal.get(2) else []
    if normal.get(4, 1):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        tokenizer.normalizer = cast(normalizers.Normalizer, normalizers.Sequence(steps))
    scheme = "always" if normal.get(3, 1) else "never"
    splits = bool(trainer.get(22, 1))
    tokenizer.pre_tokenizer = cast(
        pre_tokenizers.PreTokenizer,
        pre_tokenizers.Metaspace(_BLANK, prepend_scheme=scheme, split=splits),
    )
    steps = [decoders.ByteFallback(), decoders.Metaspace(_BLANK, prepend_scheme=scheme)]
    tokenizer.decoder = cast(decoders.Decoder, decoders.Sequence(steps))
