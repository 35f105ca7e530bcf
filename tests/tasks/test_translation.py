"""Translation: sentence pairs, beam search, BLEU."""

import gzip
import json
from pathlib import Path

import pytest

from transformer_xl.cli import main
from transformer_xl.tasks import load_task
from transformer_xl.tasks.task import read_examples
from transformer_xl.tasks.translation import Translation

PARTS = {"train": 60, "val": 8, "test_2016_flickr": 8}
MODEL = """
[data]
path = "train.txt"
valid_path = "valid.txt"
test_path = "test.txt"
vocab = "bpe"
vocab_size = 300
reset_at = "\\n"
completion_at = "\\t"

[model]
n_layer = 1
n_head = 2
d_model = 16
d_inner = 16
mem_len = 16
dropout = 0.0

[train]
steps = 3
batch_size = 2
segment_len = 16
precision = "float32"

[generate]
prompt = "\\nein Hund\\t"
length = 8
stop = ["\\n"]
beam_size = 2
"""


@pytest.fixture
def captions(tmp_path):
    """A folder as that of Multi30k."""
    folder = tmp_path / "captions"
    folder.mkdir()
    for part, n in PARTS.items():
        for language, text in (("de", "Ein  Hund Nummer {}. "), ("en", "A dog,\tnumber {}.")):
            lines = "".join(f"{text.format(x)}\n" for x in range(n))
            (folder / f"{part}.{language}.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


def test_a_pair_is_a_line_with_single_blanks(captions, tmp_path):
    load_task("translation-de-en").prepare(captions, tmp_path)
    assert (tmp_path / "valid.txt").read_text().startswith("Ein Hund Nummer 0.\tA dog, number 0.\n")
    assert [len(read_examples(tmp_path, x)) for x in ("train", "valid", "test")] == [60, 8, 8]


def test_files_of_other_languages_are_none_of_the_data(captions):
    (captions / "train.fr.gz").write_bytes(gzip.compress(b"Un chien.\n"))
    files = load_task("translation-de-en").identity(captions)
    assert [*files] == [
        f"{part}.{language}.gz" for part in sorted(PARTS) for language in ("de", "en")
    ]


def test_lines_that_do_not_match_are_refused(captions, tmp_path):
    (captions / "val.en.gz").write_bytes(gzip.compress(b"A dog.\n"))
    with pytest.raises(ValueError, match="val has 8 lines in de and 1 in en"):
        load_task("translation-de-en").prepare(captions, tmp_path)


def test_a_perfect_translation_has_a_bleu_of_100(captions, tmp_path, monkeypatch):
    task = load_task("translation-de-en")
    task.prepare(captions, tmp_path)
    ((_, copied),) = task.baselines(tmp_path, "test")
    assert copied.metrics["BLEU"] < 20
    perfect = [x.completion for x in read_examples(tmp_path, "test")]
    monkeypatch.setattr(
        "transformer_xl.tasks.translation.read_examples",
        lambda *given: [x._replace(prompt=x.completion) for x in read_examples(*given)],
    )
    ((_, found),) = task.baselines(tmp_path, "test")
    assert found.metrics == pytest.approx({"BLEU": 100, "chrF": 100})
    assert found.scores == pytest.approx([100] * len(perfect))
    assert copied.scores is not None
    assert max(copied.scores) < 100


def test_the_metric_names_the_signature_of_sacrebleu():
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    metric.corpus_score(["a"], [["a"]])
    signature = str(metric.get_signature()).rpartition("|version:")[0]
    assert Translation.metric == f"BLEU (sacrebleu, {signature})"


@pytest.mark.usefixtures("one_thread")
def test_a_model_is_trained_and_its_translations_are_scored(captions, tmp_path, capsys):
    (tmp_path / "mine.toml").write_text(MODEL)
    words = ["task", "translation-de-en", captions, "--models", tmp_path / "mine.toml"]
    assert main([*map(str, words), "--out", str(tmp_path / "out"), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    (mine,) = results["models"].values()
    assert 0 <= mine["test"]["seeds"][0]["BLEU"] <= 100
    assert results["baselines"]["source as it is"]["valid"]["seeds"][0]["chrF"] > 0


@pytest.mark.slow
def test_the_captions_are_read(tmp_path, shared):
    task = load_task("translation-en-fr")
    task.prepare(Path(shared) / "data" / "multi30k", tmp_path)
    assert len(read_examples(tmp_path, "train")) == 29_000
    test = read_examples(tmp_path, "test")
    assert test[4].prompt == "People are fixing the roof of a house."
    assert test[4].completion == "Des gens réparent le toit d'une maison."
    ((_, copied),) = task.baselines(tmp_path, "test")
    assert 0 < copied.metrics["BLEU"] < 10
