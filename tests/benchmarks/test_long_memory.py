"""The programs that write texts with known answers, and measure models trained on them."""

import json
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from transformer_xl.config import DataConfig
from transformer_xl.config.files import replace_file
from transformer_xl.config.recipes import dump_recipe
from transformer_xl.studies.compare import RUNS_FILE
from transformer_xl.train import train

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))


# Where the memory of the toy recipe, 8, and its segments, 8, matter.
CONTESTANTS: dict[str, dict[str, Any]] = {
    "txl": {},
    "gpt": {"kind": "gpt", "mem_len": 0},
    "gpt-cache": {"kind": "gpt"},
    "lstm": {"kind": "lstm", "n_head": 8, "d_inner": 2048, "attn_dropout": 0.0},
    "mamba2": {
        "kind": "mamba2",
        "n_head": 4,
        "state_size": 8,
        "d_inner": 2048,
        "attn_dropout": 0.0,
        "dropout": 0.0,
    },
}
if not find_spec("transformers"):
    del CONTESTANTS["mamba2"]


def trained(recipe: Any, data: dict[str, Any], folder: Path, **model: Any) -> str:
    """Train two steps; return the run folder."""
    config = recipe(train={"steps": 2}, generate={"prompt": "1"})
    config = replace(config, data=DataConfig(**data), model=replace(config.model, **model))
    replace_file(folder.with_suffix(".toml"), dump_recipe(config).encode())
    train(config, folder, quiet=True)
    return str(folder)


def measured(program: Any, runs: list[str], words: list[str], result: Path) -> dict[str, Any]:
    """Measure several runs by one call; return what is known of each by its name."""
    program.main(["measure", *runs, *words, "--json", str(result)])
    return {model["name"]: model for model in json.loads(result.read_text())["models"]}


def test_recall_is_measured_at_each_distance(toy_recipe, one_thread, tmp_path, capsys) -> None:
    recall = import_module("recall")
    text, result = tmp_path / "recall.txt", tmp_path / "recall.json"
    recall.main(["text", str(text), "--tokens", "3000", "--distances", "10", "20"])
    said = capsys.readouterr().err
    assert 'vocab = "integers"\nvocab_size = 41\nreset_at = "<eos>"' in said
    data = {"path": str(text), "vocab": "integers", "vocab_size": 41, "reset_at": "<eos>"}
    run = trained(toy_recipe, data, tmp_path / "run")
    more = ["--distances", "10", "40", "--episodes", "3", "--tasks", "copy", "induction"]
    recall.main(["measure", run, *more, "--json", str(result)])
    found = json.loads(result.read_text())
    (model,) = found["models"]
    assert [(x["task"], x["distance"], x["n_answers"]) for x in model["results"]] == [
        ("copy", 10, 24), ("copy", 40, 24), ("induction", 10, 3), ("induction", 40, 3)
    ]  # fmt: skip
    assert found["chance"] == 1 / 32
    table = capsys.readouterr().out
    assert f"| copy | run | {model['parameters']:,} |" in table
    assert "trained from scratch" in table
    with pytest.raises(SystemExit, match="vocabulary of 41 integers, and these episodes the inte"):
        recall.main(["measure", run, "--n_symbols", "20"])


def test_one_call_measures_all_kinds_each_with_its_own_lengths(
    toy_recipe, babi_folder, book_folder, one_thread, tmp_path
) -> None:
    recall, babilong = import_module("recall"), import_module("babilong")
    text, result = tmp_path / "recall.txt", tmp_path / "result.json"
    recall.main(["text", str(text), "--tokens", "3000", "--distances", "10", "20"])
    data = {"path": str(text), "vocab": "integers", "vocab_size": 41, "reset_at": "<eos>"}
    where = ["--babi", str(babi_folder), "--books", str(book_folder), "--tasks", "qa1"]
    babilong.main(["text", str(tmp_path / "babi.txt"), *where, "--tokens", "5000"])
    asked = {"path": str(tmp_path / "babi.txt"), "vocab": "bytes", "reset_at": "\n"}
    for program, corpus, words in (
        (recall, data, ["--distances", "10", "40", "--episodes", "2", "--tasks", "recall"]),
        (babilong, asked, [*where, "--lengths", "0", "150", "--samples", "2"]),
    ):
        # Laid out as by txl compare, whose contestants are measured by their names.
        folder = tmp_path / program.__name__
        for name, model in CONTESTANTS.items():
            (folder / name).mkdir(parents=True)
            trained(toy_recipe, corpus, folder / name / "seed_1-0", **model)
        (folder / RUNS_FILE).write_text("[]")
        for given, of_gpt, of_others in (([], (7, 8), 8), (["--mem_len", "16"], (16, None), 16)):
            found = measured(program, [str(folder)], [*words, *given], result)
            assert [*found] == sorted(CONTESTANTS)
            assert all(len(model["results"]) == 2 for model in found.values())
            lengths = {name: (x["mem_len"], x["attn_len"]) for name, x in found.items()}
            # Without a memory, every token sees the context of the training: itself and 7.
            expected = dict.fromkeys(CONTESTANTS, (of_others, None)) | {"gpt": of_gpt}
            expected |= {name: (None, None) for name in ("lstm", "mamba2") if name in CONTESTANTS}
            assert lengths == expected


def test_runs_of_a_comparison_that_have_ended_are_measured_each_under_its_own_name(
    tmp_path,
) -> None:
    named = import_module("trained_runs").named
    (tmp_path / RUNS_FILE).write_text("[]")
    (tmp_path / "txl" / "seed_1-a" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="no contestant whose training has ended"):
        named(str(tmp_path))
    for run in ("txl/seed_1-a", "gpt/seed_1-b", "gpt/seed_2-c", "gpt/search_2-d"):
        (tmp_path / run / "model" / "best").mkdir(parents=True)
    assert [name for name, _ in named(str(tmp_path))] == ["gpt/seed_1-b", "gpt/seed_2-c", "txl"]
    assert named(str(tmp_path / "txl" / "seed_1-a"))[0][0] == "seed_1-a"


def test_the_context_of_a_model_folder_without_memory_is_not_guessed(
    toy_recipe, one_thread, tmp_path
) -> None:
    runs = import_module("trained_runs")
    data = {"path": str(tmp_path / "text.txt"), "vocab": "bytes"}
    (tmp_path / "text.txt").write_text("a word. " * 500)
    trained(toy_recipe, data, tmp_path / "run", **CONTESTANTS["gpt"])
    alone = (tmp_path / "run" / "model" / "best").rename(tmp_path / "alone")
    with pytest.raises(ValueError, match=r"mem_len=0 and no recipe.*give --mem_len"):
        runs.load_run(str(alone), "alone", segment_len=None, mem_len=None)
    assert runs.load_run(str(alone), "alone", segment_len=None, mem_len=5).lengths["mem_len"] == 5


def test_questions_in_books_are_asked_at_each_length(
    toy_recipe, babi_folder, book_folder, one_thread, tmp_path, capsys
) -> None:
    babilong = import_module("babilong")
    result, table = tmp_path / "babi.json", tmp_path / "babi.md"
    where = ["--babi", str(babi_folder), "--books", str(book_folder), "--tasks", "qa1", "qa3"]
    for split in ("train", "valid"):
        more = ["--split", split, "--lengths", "0", "400", "--tokens", "5000"]
        babilong.main(["text", str(tmp_path / f"{split}.txt"), *where, *more])
    data = {
        "path": str(tmp_path / "train.txt"),
        "valid_path": str(tmp_path / "valid.txt"),
        "vocab": "bytes",
        "reset_at": "\n",
    }
    run = trained(toy_recipe, data, tmp_path / "run")
    capsys.readouterr()
    more = ["--lengths", "0", "150", "--samples", "4", "--json", str(result)]
    babilong.main(["measure", run, *where, *more, "--markdown", str(table)])
    (model,) = json.loads(result.read_text())["models"]
    assert model["trained"] == "from scratch"
    assert {(x["task"], x["length"]) for x in model["results"]} >= {("qa1", 0), ("qa1", 150)}
    assert all(x["n_samples"] <= 4 and x["accuracy"] >= 0 for x in model["results"])
    shown = capsys.readouterr().out
    assert table.read_text() == shown
    assert "| qa3 | *the most frequent answer* |" in shown
    assert "not comparable with pretrained models" in shown
    with pytest.raises(SystemExit, match="has no qa2_"):
        babilong.main(["measure", run, *where[:4], "--tasks", "qa2"])


def test_the_recipe_for_recall_is_for_its_text() -> None:
    from transformer_xl.config.recipes import load_recipe
    from transformer_xl.studies.episodes import EpisodeConfig

    recipe = load_recipe(str(Path(__file__).parents[2] / "benchmarks" / "recall.toml"))
    assert recipe.data.vocab_size == EpisodeConfig().vocab_size


def test_the_recipe_for_babi_has_the_separators_of_its_text(babi_folder, book_folder) -> None:
    from transformer_xl.config.recipes import load_recipe
    from transformer_xl.studies.babi import Books, babi_questions, book_files, evaluation_samples

    recipe = load_recipe(str(Path(__file__).parents[2] / "benchmarks" / "babi.toml"))
    questions = babi_questions(babi_folder, "qa1", "test")
    (sample,) = evaluation_samples(questions, Books(book_files(book_folder)["test"]), 300, 1)
    assert sample.line.partition(recipe.data.completion_at)[2] == f" {sample.answer}.\n"
    assert sample.line.count(recipe.data.reset_at) == 1
    for prompt in (sample.prompt, recipe.generate.prompt):
        assert prompt.startswith(recipe.data.reset_at)
        assert prompt.endswith(f"?{recipe.data.completion_at}")
