"""Answers to bAbI questions in long texts, scored as BABILong does (arXiv 2406.10149).

The samples are those of :mod:`transformer_xl.studies.babi`. A model trained on such samples from
scratch is not comparable with one that was pretrained on other text and told what to do.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from transformer_xl.data import Vocab
from transformer_xl.inference.answers import continuations
from transformer_xl.model import LanguageModel
from transformer_xl.model.arguments import require_at_least
from transformer_xl.model.limits import require_mem_len
from transformer_xl.model.segment import SEGMENT_LEN, Lengths
from transformer_xl.studies.babi import Sample

LENGTHS = (0, 1000, 2000, 4000, 8000, 16000, 32000)
ANSWER_LEN = 64
"""Tokens of an answer at most; the longest of bAbI has 19 characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """What a model answers to samples."""

    accuracy: float
    """Share of the samples with a right answer."""
    most_frequent: float
    """Accuracy of the most frequent answer of these samples, given to all of them."""
    n_samples: int
    n_tokens: float
    """Mean length of the texts, in tokens."""
    outputs: tuple[str, ...]
    """What the model wrote after each sample."""


def is_right(output: str, target: str) -> bool:
    """Whether the target is in the first sentence of the output, in lower case.

    The rule of the paper (arXiv 2406.10149). Later versions of its code also refuse a sentence that
    names other answers of the task, so an output that lists several counts here alone.

    >>> is_right(" The Bathroom. Not the garden.", "bathroom")
    True
    >>> is_right(" garden. bathroom.", "bathroom")
    False
    """
    return target.lower() in output.lower().strip().split(".")[0]


def answer_samples(
    model: LanguageModel,
    vocab: Vocab,
    samples: Sequence[Sample],
    *,
    batch_size: int = 10,
    segment_len: int = SEGMENT_LEN,
    mem_len: int | None = None,
    attn_len: int | None = None,
    answer_len: int = ANSWER_LEN,
) -> Answered:
    """Read each sample with the memory carried, write up to the end of a sentence, and score it.

    Args:
        model: The model, trained on such samples; its mode is restored afterwards.
        vocab: Its vocabulary.
        samples: The samples.
        batch_size: Samples that are read and answered as a batch, those of similar length together.
        segment_len: Segment length.
        mem_len: Memory length. None: as configured, like ``attn_len``.
        attn_len: Keys a query sees in the samples, counting its own; in the answers it sees
            ``mem_len`` and its own.
        answer_len: Tokens of an answer at most.

    Raises:
        ValueError: The vocabulary is not that of the model or lacks a symbol of a sample, there is
            no sample, a length does not fit the model, or a count is below 1.
    """
    require_at_least(1, batch_size=batch_size, answer_len=answer_len)
    if len(vocab) != model.config.vocab_size:
        raise ValueError(
            f"the model has a vocabulary of {model.config.vocab_size:,} tokens and this one has "
            f"{len(vocab):,}: give the vocabulary of the model's folder"
        )
    if not samples:
        raise ValueError("no samples: give at least one")
    require_mem_len(model, mem_len)
    lengths = Lengths.of(
        model.config, segment_len=segment_len, mem_len=mem_len, attn_len=attn_len, ext_len=0
    )
    texts = [vocab.encode(sample.prompt) for sample in samples]
    outputs = continuations(
        model, vocab, texts, lengths, length=answer_len, stop=".", batch_size=batch_size
    )
    n_right = sum(is_right(x, y.answer) for x, y in zip(outputs, samples, strict=True))
    ((_, most),) = Counter(sample.answer for sample in samples).most_common(1)
    return Answered(
        accuracy=n_right / len(samples),
        most_frequent=most / len(samples),
        n_samples=len(samples),
        n_tokens=sum(map(len, texts)) / len(texts),
        outputs=tuple(outputs),
    )
