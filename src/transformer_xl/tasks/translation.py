"""Translation: Multi30k image captions; a prefix language model over source and target.

Elliott et al., Multi30K: Multilingual English-German Image Descriptions, 2016 (arXiv 1605.00459).
The source is the prompt and the translation its completion, searched with beams and scored by
BLEU (Post, A Call for Clarity in Reporting BLEU Scores, 2018: cased, tokenization 13a).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from transformer_xl.data import SPLITS, optional_package
from transformer_xl.errors import DataError
from transformer_xl.inference import continuations
from transformer_xl.tasks.task import (
    TASKS_EXTRA,
    Example,
    Measured,
    Task,
    Trained,
    encoded_prompts,
    read_examples,
    read_utf8,
    write_examples,
)

_PARTS = dict(zip(SPLITS, ("train", "val", "test_2016_flickr"), strict=True))
"""The names of the splits in the data."""


def _files(*languages: str) -> tuple[str, ...]:
    return tuple(f"{part}.{language}.gz" for part in _PARTS.values() for language in languages)


class Translation(Task):
    """Translation between two languages of Multi30k."""

    metric = "BLEU (sacrebleu, nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp)"
    source: ClassVar[str]
    target: ClassVar[str]

    def prepare(self, source: Path, folder: Path) -> None:
        """Write the sentence pairs; ``source`` is a folder with ``train.de.gz`` and so on."""
        for split, part in _PARTS.items():
            prompts, completions = (
                _sentences(source / f"{part}.{language}.gz")
                for language in (self.source, self.target)
            )
            if len(prompts) != len(completions):
                raise DataError(
                    f"{source}: {part} has {len(prompts)} lines in {self.source} and "
                    f"{len(completions)} in {self.target}; line n must translate line n"
                )
            write_examples(folder, split, [*map(Example, prompts, completions)])

    def measure(self, trained: Trained, folder: Path, split: str) -> Measured:
        """Translate each sentence, and compare it."""
        examples, settings = read_examples(folder, split), trained.config.generate
        found = continuations(
            trained.model,
            trained.vocab,
            encoded_prompts(trained, examples),
            trained.lengths,
            length=settings.length,
            stop="\n",
        )
        return _measured(examples, found)

    def baselines(self, folder: Path, split: str) -> Iterator[tuple[str, Measured]]:
        """Yield what the untranslated source reaches."""
        examples = read_examples(folder, split)
        yield "source as it is", _measured(examples, [x.prompt for x in examples])


class GermanEnglish(Translation):
    """German to English."""

    name, source, target = "translation-de-en", "de", "en"
    reads = _files(source, target)
    title = "Multi30k, German to English"
    models = {"txl": ("translation-de-en",)}  # noqa: RUF012


class EnglishFrench(Translation):
    """English to French."""

    name, source, target = "translation-en-fr", "en", "fr"
    reads = _files(source, target)
    title = "Multi30k, English to French"
    models = {"txl": ("translation-en-fr",)}  # noqa: RUF012


def _sentences(path: Path) -> list[str]:
    """Return the sentences of a file, a line each, with single blanks between words."""
    text = read_utf8(path)
    return [" ".join(line.split()) for line in text.removesuffix("\n").split("\n")]


def _measured(examples: Sequence[Example], found: Sequence[str]) -> Measured:
    """Return BLEU and chrF of all sentences, and the smoothed BLEU of each."""
    sacrebleu = optional_package("sacrebleu", "translation", TASKS_EXTRA)
    BLEU, CHRF = sacrebleu.BLEU, sacrebleu.CHRF
    expected = [x.completion for x in examples]
    metrics = {
        "BLEU": BLEU().corpus_score(found, [expected]).score,
        "chrF": CHRF().corpus_score(found, [expected]).score,
    }
    of_sentence = BLEU(effective_order=True)
    pairs = zip(found, expected, strict=True)
    scores = [of_sentence.sentence_score(text, [reference]).score for text, reference in pairs]
    return Measured(metrics, np.array(scores))
