"""Vocabularies read from files, and learned from texts."""

from collections import Counter
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from transformer_xl.data.counting import counted_vocab
from transformer_xl.data.vocab import Vocab, VocabKind, byte_characters, symbols_in

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


def train_vocab(
    kind: VocabKind,
    texts: Iterable[str],
    vocab_size: int | None = None,
    held_out: Iterable[str] = (),
) -> Vocab:
    """Make a vocabulary for a text.

    Args:
        kind: What the symbols are.
        texts: The training text in pieces; ``words`` must not be cut apart.
        vocab_size: Largest number of symbols, for words and bpe. None: all words, or
            4,096 byte-pair units.
        held_out: Further text, from which nothing is learned but whether ``<unk>`` is needed.

    Raises:
        ValueError: ``vocab_size`` is too small, or ``kind`` is ``imported`` or ``brought``.
    """
    if kind in ("imported", "brought"):
        raise ValueError(f"an {kind} vocabulary is read, not trained: choose another kind")
    if kind == "bytes":
        tokenizer = Tokenizer(
            models.BPE(vocab={c: byte for byte, c in enumerate(byte_characters())}, merges=[])
        )
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "bpe":
        tokenizer = _train_bpe(texts, DEFAULT_BPE_SIZE if vocab_size is None else vocab_size)
    else:
        count: Counter[str] = Counter()
        for text in texts:
            count.update(symbols_in(kind, text))
        # Equal counts keep the order of appearance, as in the authors' vocabularies.
        symbols = [symbol for symbol, _ in count.most_common()]
        has_unknown = any(x not in count for text in held_out for x in symbols_in(kind, text))
        return counted_vocab(kind, symbols, vocab_size, has_unknown=has_unknown)
    return Vocab(kind, tokenizer.to_str(pretty=True))


def _train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    alphabet = byte_characters()
    if vocab_size < len(alphabet):
        raise ValueError(
            f"data.vocab_size={vocab_size} must be at least 256 for bpe: every byte is a unit"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
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
