"""SentencePiece models, written as a ``tokenizer.json`` (Kudo and Richardson 2018).

Kept are the pieces and their scores, the table of normal forms, and the rules for blanks.
"""

import struct
from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_NEVER = -1e4
_UNIGRAM, _BPE = 1, 2
_UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_BLANK = "\u2581"


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
        model = models.Unigram(scored, unk_id=unknown, byte_fallback=has_bytes)
    else:
        model = models.BPE(
            vocab={name: n for n, (name, _, _) in enumerate(pieces)},
            merges=_merges([x for x in pieces if x[2] not in hidden]),
            unk_token=pieces[unknown][0],
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    tokenizer: Any = Tokenizer(model)
    steps: list[Any] = [normalizers.Precompiled(normal[2])] if normal.get(2) else []
    if normal.get(4, 1):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if normal.get(3, 1) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        _BLANK, prepend_scheme=scheme, split=bool(trainer.get(22, 1))
    )
    steps = [decoders.ByteFallback(), decoders.Metaspace(_BLANK, prepend_scheme=scheme)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = [AddedToken(x[0], special=True, normalized=False) for x in pieces if x[2] == _CONTROL]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(x[0], normalized=False) for x in pieces if x[2] == _USER])
    return tokenizer.to_str(pretty=True)


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Return the pairs that were joined, best first, which the model tells by its scores."""
    order = {name: n for n, (name, _, _) in enumerate(pieces)}
    found = []
    for number, (name, score, _) in enumerate(pieces):
        pairs = [(name[:n], name[n:]) for n in range(1, len(name))]
        pairs = [(a, b) for a, b in pairs if a in order and b in order]
        found += [(-score, number, order[a], order[b], a, b) for a, b in pairs]
    return [(a, b) for *_, a, b in sorted(found)]


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field: an integer, or the bytes of anything else."""
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
    """Read the integer that begins at a place; return it and where it ends."""
    value = 0
    for i, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, at + i + 1
    raise ValueError("a number in the message has no end")
