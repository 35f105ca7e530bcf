"""What is measured of the models that come with the package, beside the loss."""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from compressing import UNSEEN  # noqa: E402
from stutter import PROMPTS, measured  # noqa: E402
from tang_poems import POEM_END, is_in_form  # noqa: E402
from writing import TrainingText  # noqa: E402
from writing_rows import writing_rows  # noqa: E402

from transformer_xl.apps.compress import Settings, compress  # noqa: E402
from transformer_xl.cli.loading import load  # noqa: E402
from transformer_xl.config.recipes import generation_of  # noqa: E402
from transformer_xl.data import Corpus  # noqa: E402
from transformer_xl.inference.generate import Sampling, generate_batch  # noqa: E402
from transformer_xl.studies.baselines import compressed_bytes  # noqa: E402

Figures = dict[str, Any]

N_POEMS, N_CHORALES = 100, 16
VOICES = 4


class Measurement(NamedTuple):
    """How a model is measured."""

    measure: Callable[[Path, Corpus], Figures]
    """Takes its folder and its corpus."""
    names: tuple[str, ...]
    """The figures that are returned."""


def _written(folder: Path, corpus: Corpus, *words: str) -> Figures:
    real, own = writing_rows(folder, corpus, *words, with_training=True)
    return {f"real_{name}": x for name, x in real.items()} | own


def _after_prompts(folder: Path, corpus: Corpus) -> Figures:
    """Measure texts after prompts with stutter.py: with the preface, without, and real text."""
    name = folder.name.rpartition("-")[0]
    with tempfile.TemporaryDirectory() as temporary:
        real = Path(temporary) / "real.txt"
        real.write_bytes(corpus.raw(corpus.held_out))
        given = argparse.Namespace(
            seeds=10, length=600, set=[], real=real, python=name == "python-code"
        )
        found = measured(str(folder), PROMPTS[name], given)
    rows = {"": found["with"], "without_": found["without"], "real_": found["real"]}
    return {prefix + x: value for prefix, row in rows.items() for x, value in row.items()}


def compressed(folder: Path, *, learn: bool = False) -> float:
    """Compress three files of the held-out package; return the size relative to that of xz."""
    import networkx

    root, (model, vocab) = Path(networkx.__file__).parent, load(folder)
    contents = [(root / name).read_bytes() for name in UNSEEN]
    settings = Settings(learn=learn)
    sizes = [len(compress(x, model, vocab, settings).content) for x in contents]
    return sum(sizes) / sum(compressed_bytes("xz -9e", x) for x in contents)


def _english(folder: Path, corpus: Corpus) -> Figures:
    real, own = writing_rows(folder, corpus, with_training=True)
    copied = {"copied": own["copied"], "real_copied": real["copied"]}
    return copied | _after_prompts(folder, corpus)


def _python(folder: Path, corpus: Corpus) -> Figures:
    ratios = {"xz_ratio": compressed(folder), "xz_ratio_learned": compressed(folder, learn=True)}
    return _english(folder, corpus) | ratios


def _copied(corpus: Corpus, texts: Iterable[str], prefix: str = "") -> Figures:
    training = TrainingText(corpus.vocab.decode(corpus.split("train")).encode())
    return {f"{prefix}copied": training.copied([text.encode() for text in texts])}


def _poems(folder: Path, corpus: Corpus) -> Figures:
    """Count the poems, and how many of 100 to titles of the test text have lines of one length."""
    texts = {part: corpus.vocab.decode(corpus.split(part)) for part in ("train", "valid", "test")}
    titles = [x.partition("\n")[0] + "\n" for x in texts["test"].split(POEM_END)[:N_POEMS]]
    model, vocab = load(folder)
    sampling = Sampling(**generation_of(folder).sampling)
    prompts = [vocab.encode(POEM_END + title) for title in titles]
    batch = generate_batch(model, prompts, sampling, length=400, seed=1)
    poems = batch.decode(vocab, POEM_END)
    counts = {part: text.count(POEM_END) for part, text in texts.items()}
    return {
        "training_poems": counts["train"],
        "held_out_poems": counts["test"],
        "symbols": len({*"".join(texts.values())}),
        "in_form": sum(map(is_in_form, poems)) / len(poems),
        **_copied(corpus, poems),
    }


def longest_chord(text: str) -> int:
    """Return for how many steps a piece repeats all its voices at most; 0: it has no step."""
    words = text.split()
    steps = [words[n : n + VOICES] for n in range(0, len(words) - VOICES + 1, VOICES)]
    return max((sum(1 for _ in same) for _, same in groupby(steps)), default=0)


def _chords(texts: Iterable[str], prefix: str = "") -> Figures:
    found = [longest_chord(text) for text in texts]
    return {f"{prefix}median_chord": statistics.median(found), f"{prefix}most_chord": max(found)}


def _chorales(folder: Path, corpus: Corpus) -> Figures:
    """Write pieces from the recipe's prompt; see whether they end, and how long a chord is held."""
    settings = generation_of(folder)
    model, vocab = load(folder)
    prompts = [vocab.encode(settings.prompt)] * N_CHORALES
    sampling = Sampling(**settings.sampling)
    batch = generate_batch(model, prompts, sampling, length=settings.length, seed=1)
    texts = batch.decode(vocab, "\n")
    ended = [len(text.split()) < settings.length for text in texts]
    real = [x for x in corpus.vocab.decode(corpus.split("test")).split("\n") if x.strip()]
    return (
        {"ended": sum(ended) / len(texts)}
        | _copied(corpus, texts)
        | _copied(corpus, real, "real_")
        | _chords(texts)
        | _chords(real, "real_")
    )


_WRITING = tuple(
    row + x for row in ("", "real_") for x in ("repeated_4grams", "adjacent_equal", "copied")
)
_PROMPTED = tuple(row + x for row in ("", "without_", "real_") for x in ("stutter", *_WRITING[:2]))
_ENGLISH = (*_PROMPTED, "copied", "real_copied")
_PYTHON = (*_ENGLISH, "parses", "without_parses", "xz_ratio", "xz_ratio_learned")
_CHORDS = ("median_chord", "most_chord", "real_median_chord", "real_most_chord")

MEASURED: Mapping[str, Measurement] = {
    "python-code": Measurement(_python, _PYTHON),
    "english": Measurement(_english, _ENGLISH),
    "shakespeare": Measurement(_written, _WRITING),
    "tang-poems": Measurement(
        _poems, ("training_poems", "held_out_poems", "symbols", "in_form", "copied")
    ),
    "chorales": Measurement(_chorales, ("ended", "copied", "real_copied", *_CHORDS)),
}
