"""Vocabularies of counted symbols, also of texts that are counted in parts.

Each part leaves a file: a symbol, how often it is there, and when it came first, a line each, in
the order of the symbols. The files are merged as they are read, so that rare words take no memory.
"""

import heapq
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from transformer_xl.data.imported import SPACE, ImportedVocab, Rules, cutter
from transformer_xl.data.text import Span, read_blocks, read_bytes
from transformer_xl.data.vocab import EOS, UNK, Vocab, VocabKind, byte_characters, symbols_in

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
# How many files are read at once.
_FAN_IN = 200


class Count(NamedTuple):
    """A symbol of one part."""

    symbol: str
    part: int
    first: int
    n: int


def counted_vocab(
    kind: VocabKind, symbols: Sequence[str], vocab_size: int | None, *, has_unknown: bool
) -> Vocab:
    """Make a vocabulary of characters, words or integers.

    Args:
        kind: What the symbols are.
        symbols: Those that were counted, most frequent first.
        vocab_size: As in `train_vocab`.
        has_unknown: Whether there were others in the text.

    Raises:
        ValueError: ``vocab_size`` is too small, or an integer is none.
    """
    if kind == "words":
        symbols = [*symbols, *([] if EOS in symbols else [EOS])]
        has_unknown |= vocab_size is not None and len(symbols) > vocab_size
    elif kind == "integers":
        symbols = _integers(symbols, vocab_size)
    else:
        symbols = sorted(symbols)
    if has_unknown and UNK not in symbols and kind != "integers":
        symbols = [*symbols, UNK]
    if kind == "words" and vocab_size is not None:
        symbols = _most_frequent(symbols, vocab_size)
    ids = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token=UNK))
    if kind == "chars":
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    else:
        tokenizer.normalizer = cast(normalizers.Normalizer, normalizers.Replace("\n", f" {EOS} "))
        # As `symbols_in` does, so that both roads give the same numbers.
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"[{SPACE}]+"), "removed")
    return Vocab(kind, tokenizer.to_str(pretty=True))


def _integers(symbols: Sequence[str], vocab_size: int | None) -> list[str]:
    if vocab_size is not None:
        return [*map(str, range(vocab_size - 1)), EOS]
    found = [symbol for symbol in symbols if symbol != EOS]
    for symbol in found:
        if not _INTEGER.fullmatch(symbol):
            raise ValueError(
                f"data.vocab=integers: {symbol[:40]!r} is no integer; they are written like 7 or "
                "-12, with blanks between them and a sequence a line"
            )
    return [*sorted(found, key=int), EOS]


def _most_frequent(symbols: Sequence[str], vocab_size: int) -> list[str]:
    special = [symbol for symbol in symbols if symbol in (EOS, UNK)]
    if vocab_size < len(special) + 1:
        raise ValueError(
            f"data.vocab_size={vocab_size} leaves no room for a word beside {' and '.join(special)}"
        )
    words = [symbol for symbol in symbols if symbol not in (EOS, UNK)]
    kept = {*special, *words[: vocab_size - len(special)]}
    return [symbol for symbol in symbols if symbol in kept]


def authors_bytes(byte_values: Sequence[int]) -> ImportedVocab:
    """Make the authors' vocabulary of enwik8: bytes, most frequent first, without line breaks.

    The same as of their checkpoints: ``prep_enwik8.py`` wrote the values of bytes as words, with a
    line end for each line break, which got no symbol.
    """
    characters = byte_characters()
    symbols = [characters[byte] for byte in byte_values if byte != ord("\n")]
    rules = Rules(join="bytes")
    dropped = normalizers.Sequence([normalizers.Replace(Regex(r"\n"), "")])
    return ImportedVocab(cutter(symbols, rules, [dropped]).to_str(pretty=True), rules)


def count_part(kind: str, spans: Sequence[Span], target: Path) -> None:
    """Count the symbols of some text and write the file of that part to ``target``."""
    # In the order in which they come first.
    counts: Counter[str] = Counter()
    if kind == "authors-bytes":
        for span in spans:
            for block in read_bytes(span):
                values = np.frombuffer(block, dtype=np.uint8)
                found, first, n = np.unique(values, return_index=True, return_counts=True)
                order = np.argsort(first)
                names = map(str, found[order].tolist())
                counts.update(dict(zip(names, n[order].tolist(), strict=True)))
    else:
        for block in read_blocks(cast(VocabKind, kind), spans):
            counts.update(symbols_in(cast(VocabKind, kind), block))
    write = _quoted if kind == "chars" else str
    first_of = {symbol: number for number, symbol in enumerate(counts)}
    with target.open("w", encoding="utf-8", newline="\n") as file:
        for symbol in sorted(counts):
            file.write(f"{write(symbol)}\t{counts[symbol]}\t{first_of[symbol]}\n")


def _quoted(character: str) -> str:
    """Write a character that may be a tab or a line end, keeping the order."""
    return f"{ord(character):06x}"


def _read_counts(kind: str, path: Path, part: int) -> Iterator[Count]:
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            symbol, n, first = line.rstrip("\n").split("\t")
            name = chr(int(symbol, 16)) if kind == "chars" else symbol
            yield Count(name, part, int(first), int(n))


def _merged(kind: str, paths: Sequence[Path], start: int = 0) -> Iterator[Count]:
    """Read the files of parts as one, in the order of the symbols, equal ones by part."""
    if len(paths) <= _FAN_IN:
        numbered = enumerate(paths, start)
        return heapq.merge(*(_read_counts(kind, path, part) for part, path in numbered))
    groups = []
    for begin in range(0, len(paths), _FAN_IN):
        group = paths[begin : begin + _FAN_IN]
        joined = group[0].with_name(f"{group[0].name}.merged")
        _write_merged(kind, group, start + begin, joined)
        groups.append(_read_merged(kind, joined))
    return heapq.merge(*groups)


def _write_merged(kind: str, paths: Sequence[Path], start: int, target: Path) -> None:
    write = _quoted if kind == "chars" else str
    with target.open("w", encoding="utf-8", newline="\n") as file:
        for symbol, counts in itertools.groupby(_merged(kind, paths, start), key=_symbol):
            first, *others = counts
            n = first.n + sum(x.n for x in others)
            file.write(f"{write(symbol)}\t{first.part}\t{first.first}\t{n}\n")


def _read_merged(kind: str, path: Path) -> Iterator[Count]:
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            symbol, part, first, n = line.rstrip("\n").split("\t")
            name = chr(int(symbol, 16)) if kind == "chars" else symbol
            yield Count(name, int(part), int(first), int(n))


def _symbol(count: Count) -> str:
    return count.symbol


def _symbol_of_pair(pair: tuple[Count, bool]) -> str:
    return pair[0].symbol


def vocab_of_counts(
    kind: str, counted: Sequence[Path], others: Sequence[Path], vocab_size: int | None
) -> Vocab:
    """Make the vocabulary of texts whose parts were counted.

    Args:
        kind: What was counted.
        counted: The files of the parts whose symbols the vocabulary has.
        others: The files of further parts: what only these have is unknown.
        vocab_size: As in `train_vocab`.

    Raises:
        ValueError: ``vocab_size`` is too small, or an integer is none.
    """
    has_unknown = False

    def totals() -> Iterator[tuple[int, int, int, str]]:
        nonlocal has_unknown
        known = ((count, True) for count in _merged(kind, counted))
        further = ((count, False) for count in _merged(kind, others))
        merged = heapq.merge(known, further, key=_symbol_of_pair)
        for symbol, group in itertools.groupby(merged, key=_symbol_of_pair):
            counts = [count for count, is_known in group if is_known]
            if counts:
                yield -sum(x.n for x in counts), counts[0].part, counts[0].first, symbol
            else:
                has_unknown = True

    # Beside the most frequent words, two more show that there are others.
    limit = vocab_size + 2 if vocab_size is not None and kind == "words" else None
    ranked = sorted(totals()) if limit is None else heapq.nsmallest(limit, totals())
    symbols = [symbol for _, _, _, symbol in ranked]
    if kind == "authors-bytes":
        return authors_bytes([int(symbol) for symbol in symbols])
    return counted_vocab(cast(VocabKind, kind), symbols, vocab_size, has_unknown=has_unknown)
