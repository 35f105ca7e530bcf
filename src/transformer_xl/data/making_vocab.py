"""Learning vocabularies from texts."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import cast

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from transformer_xl.data.imported import ImportedVocab
from transformer_xl.data.vocab import EOS, UNK, Vocab, VocabKind, byte_characters, symbols_in
from transformer_xl.errors import DataError, InputError

DEFAULT_BPE_SIZE = 4096
# A unit may hold a word with the mark and the space before it ("(self", ", name"), a run of
# marks with the line break and indentation after it (":\n    "), or blank lines with the
# indentation that follows. With 4,096 units, Python source takes 10 % fewer tokens than with
# GPT-2's pattern. Every unit ends before the first visible character of a line: text may be cut
# there (`split_point`).
_UNITS = (
    r"[^\s\p{L}\p{N}_]? ?[\p{L}\p{N}_]+"
    r"| ?[^\s\p{L}\p{N}_]+(?:\n[ \t]*)*"
    r"|(?:[ \t]*\n)+[ \t]*"
    r"|[ \t]+"
    r"|\s"
)
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")


def train_vocab(
    kind: VocabKind,
    texts: Iterable[str],
    vocab_size: int | None = None,
    held_out: Iterable[str] = (),
    apart: Iterable[str] = (),
) -> Vocab:
    """Learn a vocabulary from a text.

    Args:
        kind: The kind of tokenization.
        texts: The training text in pieces, which must not split ``words``.
        vocab_size: Largest number of tokens, for words and bpe. None: all words, or
            4,096 byte-pair units.
        held_out: Further text, used only to decide whether ``<unk>`` is needed.
        apart: For bpe, texts that are in no longer unit, such as a line end.

    Raises:
        InputError: ``vocab_size`` is too small, or ``kind`` is ``imported`` or ``brought``.
    """
    if kind in ("imported", "brought"):
        raise InputError(f"an {kind} vocabulary is loaded, not learned: choose another kind")
    if kind == "bytes":
        tokenizer = Tokenizer(
            models.BPE(vocab={c: byte for byte, c in enumerate(byte_characters())}, merges=[])
        )
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "bpe":
        size = DEFAULT_BPE_SIZE if vocab_size is None else vocab_size
        tokenizer = _train_bpe(texts, size, apart)
    else:
        counts = Counter[str]()
        for text in texts:
            counts.update(symbols_in(kind, text))
        # Equal counts keep the order of appearance, as in the authors' vocabularies.
        symbols = [symbol for symbol, _ in counts.most_common()]
        has_unknown = any(x not in counts for text in held_out for x in symbols_in(kind, text))
        if kind == "words":
            symbols = [*symbols, *([] if EOS in symbols else [EOS])]
            has_unknown |= vocab_size is not None and len(symbols) > vocab_size
        elif kind == "integers":
            if wrong := next((x for x in symbols if x != EOS and not _INTEGER.fullmatch(x)), None):
                raise DataError(
                    f"data.vocab=integers: {wrong[:40]!r} is no integer; they are written like 7 "
                    "or -12, with blanks between them and a sequence a line"
                )
            numbers = {*symbols} - {EOS} if vocab_size is None else map(str, range(vocab_size - 1))
            symbols = [*sorted(numbers, key=int), EOS]
        else:
            symbols = sorted(symbols)
        if has_unknown and UNK not in symbols and kind != "integers":
            symbols = [*symbols, UNK]
        if kind == "words" and vocab_size is not None:
            special = [x for x in symbols if x in (EOS, UNK)]
            if vocab_size <= len(special):
                names = " and ".join(special)
                raise InputError(
                    f"data.vocab_size={vocab_size} has no tokens for words beside {names}"
                )
            words = [x for x in symbols if x not in special]
            chosen = {*special, *words[: vocab_size - len(special)]}
            symbols = [x for x in symbols if x in chosen]
        ids = {symbol: number for number, symbol in enumerate(symbols)}
        tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token=UNK))
        if kind == "chars":
            tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            tokenizer.decoder = decoders.Fuse()
        else:
            ends = normalizers.Replace("\n", f" {EOS} ")
            tokenizer.normalizer = cast(normalizers.Normalizer, ends)
            # As `symbols_in` does, so that both give the same IDs.
            tokenizer.pre_tokenizer = pre_tokenizers.Split(
                Regex(f"[{ImportedVocab.SPACE}]+"), "removed"
            )
    return Vocab(kind, tokenizer.to_str(pretty=True))


def _train_bpe(texts: Iterable[str], vocab_size: int, apart: Iterable[str]) -> Tokenizer:
    alphabet = byte_characters()
    if vocab_size < len(alphabet):
        raise InputError(
            f"data.vocab_size={vocab_size} must be at least 256 for bpe: every byte is a unit"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(text, "isolated") for text in apart),
            pre_tokenizers.Split(Regex(_UNITS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False),
    )
    return tokenizer
