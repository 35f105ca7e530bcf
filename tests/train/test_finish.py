"""The end of a run: results that can be computed again, and no work that was done before."""

import gzip
import json
import lzma
from dataclasses import replace
from functools import partial

import pytest

from transformer_xl.data import prepare
from transformer_xl.inference.evaluate import WithMemory, evaluate
from transformer_xl.inference.generate import Sampling, generate
from transformer_xl.model import TransformerXL
from transformer_xl.train import Interrupted, finish, loop, report, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    """The pictures take most of the time and are not what is asked here."""

    def write_report(folder):
        (folder / "report.html").write_text("")
        return folder / "report.html"

    monkeypatch.setattr(report, "write_report", write_report)


@pytest.fixture
def short(toy_recipe):
    """A recipe of two steps."""

    def make(**sections):
        sections.setdefault("train", {})
        return toy_recipe(**sections | {"train": {"steps": 2, **sections["train"]}})

    return make


@pytest.fixture
def no_work(monkeypatch):
    """From here on, training and evaluating are errors."""

    def forbid():
        for module, name in ((loop, "train_step"), (finish, "evaluate_by"), (finish, "generate")):
            monkeypatch.setattr(module, name, None)

    return forbid


def read(folder, name):
    return json.loads((folder / name).read_text())


def test_the_result_is_what_evaluate_says_of_the_best_model(tmp_path, short):
    config = short(eval={"mem_lens": (0,), "mem_len": 21, "segment_len": 16})
    results = train(config, tmp_path, quiet=True)
    assert results == read(tmp_path, "results.json")
    assert [row["mem_len"] for row in results["memory_curve"]] == [0, 8, 21]
    assert results["test"] == results["memory_curve"][2]
    model = TransformerXL.from_pretrained(tmp_path / "model" / "best")
    test = prepare(config.data).split("test")
    for row in results["memory_curve"]:
        found = evaluate(model, test, WithMemory(segment_len=16, mem_len=row["mem_len"]))
        assert row["nll"] == pytest.approx(found.nll, rel=1e-6)
        assert (row["tokens"], row["segment_len"], row["split"]) == (len(test) - 1, 16, "test")
        assert "attn_len" in row


def test_compressors_get_the_very_bytes_of_the_held_out_text(
    tmp_path, short, toy_text, monkeypatch
):
    results = train(short(data={"test_fraction": 0.1}), tmp_path, quiet=True)
    text = toy_text.read_bytes()
    held_out = text[int(len(text) * 0.9) :]
    bits = 8 / len(held_out)
    assert results["gzip_bits_per_byte"] == len(gzip.compress(held_out, 9)) * bits
    extreme = lzma.compress(held_out, preset=9 | lzma.PRESET_EXTREME)
    assert results["xz_bits_per_byte"] == len(extreme) * bits


def test_the_sample_is_what_generate_writes_with_these_settings(tmp_path, short):
    settings = {"prompt": "the ", "length": 30, "temperature": 0.7, "top_k": 5, "seed": 3}
    config = short(generate=settings)
    train(config, tmp_path, quiet=True)
    model = TransformerXL.from_pretrained(tmp_path)
    vocab = prepare(config.data).vocab
    sampling = Sampling(temperature=0.7, top_k=5)
    ids = vocab.encode("the ")
    expected = vocab.decode([*generate(model, ids, sampling, length=30, seed=3)])
    assert read(tmp_path, "sample.json") == {
        "prompt": "the ",
        "text": expected,
        "settings": {"temperature": 0.7, "top_k": 5, "top_p": None, "seed": 3},
    }
    assert len(expected) == 30


def test_a_finished_run_only_repeats_its_results(tmp_path, short, no_work, capsys):
    config = short(eval={"mem_lens": (0,)})
    results = train(config, tmp_path, quiet=True)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    no_work()
    assert train(config, tmp_path) == results
    said = capsys.readouterr().err
    assert "the run is finished" in said
    assert f"{results['memory_curve'][0]['nll']:.4f} nats" in said
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}


def test_an_end_that_was_cut_short_is_made_up_for(tmp_path, short, monkeypatch):
    results = train(short(), tmp_path, quiet=True)
    monkeypatch.setattr(loop, "train_step", None)
    path, report_path = tmp_path / "results.json", tmp_path / "report.html"
    # Half of the results, those of something else, without settings, and of an earlier version.
    earlier = json.dumps({name: x for name, x in results.items() if name != "checksum"})
    wrong = ('{"settings"', "[]", '{"settings": 3}', earlier)
    spoils = [report_path.unlink, path.unlink, *(partial(path.write_text, x) for x in wrong)]
    for spoil in spoils:
        spoil()
        again = train(short(), tmp_path, quiet=True)
        assert again["test"]["nll"] == results["test"]["nll"], spoil
        assert report_path.exists(), spoil
        assert read(tmp_path, "results.json") == again, spoil


def test_an_end_that_is_interrupted_is_made_by_the_same_command(tmp_path, short, monkeypatch):
    def interrupt(*about, **settings):
        raise KeyboardInterrupt

    for name in ("evaluate_by", "generate"):
        with monkeypatch.context() as patch:
            patch.setattr(finish, name, interrupt)
            with pytest.raises(Interrupted, match="with the training done and saved; the same com"):
                train(short(), tmp_path, quiet=True)
        monkeypatch.setattr(loop, "train_step", None)
    results = train(short(), tmp_path, quiet=True)
    assert read(tmp_path, "results.json") == results
    assert (tmp_path / "report.html").exists()


def test_another_test_text_or_length_is_evaluated_without_training_again(
    tmp_path, short, monkeypatch, no_work
):
    for name, text in (("one", "the cat ran to sea\n"), ("other", "sea to ran dog cat the\n")):
        (tmp_path / name).write_text(text * 20)
    one, other = (short(data={"test_path": str(tmp_path / name)}) for name in ("one", "other"))
    first = train(one, tmp_path / "run", quiet=True)
    monkeypatch.setattr(loop, "train_step", None)
    results = train(other, tmp_path / "run", quiet=True)
    assert results["test"]["tokens"] == prepare(other.data).n_tokens("test") - 1
    assert results["test"]["nll"] != first["test"]["nll"]
    longer = replace(other, eval=replace(other.eval, mem_lens=(1, 2)))
    results = train(longer, tmp_path / "run", quiet=True)
    assert [row["mem_len"] for row in results["memory_curve"]] == [1, 2, 8]
    no_work()
    assert train(longer, tmp_path / "run", quiet=True) == results


def test_a_training_ends_with_its_figures_once(tmp_path, short, monkeypatch, capsys):
    config = short(data={"test_fraction": 0.1}, eval={"mem_lens": (0,)})
    results = train(config, tmp_path)
    said = capsys.readouterr().err
    figures = repr(results)
    assert said.endswith(f"{figures}\n")
    for line in figures.splitlines():
        assert said.count(line) == 1, line
    # Two memories and the compressors.
    assert [line.split()[0] for line in figures.splitlines()] == ["memory", "memory", "gzip:"]
    assert results == json.loads((tmp_path / "results.json").read_text())
    assert repr(train(config, tmp_path, quiet=True)) == figures
