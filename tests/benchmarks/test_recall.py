"""Episodes: each answer is determined by one token at its distance, and models are measured."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from transformer_xl.train import train


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return import_module("recall")


@pytest.mark.parametrize("task", ["copy", "recall", "induction"])
def test_each_answer_repeats_the_token_at_its_distance(program: ModuleType, task: str) -> None:
    draw = np.random.default_rng(0)
    shortest = program.SHORTEST[task]
    for distance in (shortest, shortest + 1, shortest + 17, 200):
        for n_answers in (1, 4):
            episode = program.make_episode(task, distance, draw, n_answers)
            tokens, answers, sources = episode
            assert (tokens[answers] == tokens[sources]).all()
            assert answers[0] - sources[0] == distance
            if n_answers == 1 or task == "copy":
                assert (answers - sources == distance).all()
            assert answers[-1] == len(tokens) - 1
            assert 0 <= tokens.min() <= tokens.max() < program.EOS
            if task != "copy":
                # The token before an answer stands before its source, too.
                assert (tokens[answers - 1] == tokens[sources - 1]).all()
                (others,) = np.nonzero(tokens[: answers[0]] == tokens[answers[0]])
                assert others.tolist() == [sources[0]]
    with pytest.raises(ValueError, match=f"must be at least {shortest} for {task}"):
        program.make_episode(task, shortest - 1, draw)


@pytest.mark.slow
def test_recall_is_measured_at_each_distance(
    program: ModuleType, toy_recipe, one_thread, tmp_path, capsys
) -> None:
    for name, n_tokens in (("short", 500), ("text", 3000)):
        words = ["--tokens", f"{n_tokens}", "--distances", "10", "20"]
        program.main(["text", str(tmp_path / name), *words])
    short, text = (tmp_path / name for name in ("short", "text"))
    assert text.read_text().startswith(short.read_text())
    recipe = toy_recipe(
        train={"steps": 2},
        generate={"prompt": "1"},
        data={"path": str(text), "vocab": "integers", "vocab_size": 41, "reset_at": "<eos>"},
    )
    run, result = tmp_path / "run", tmp_path / "recall.json"
    train(recipe, run, quiet=True)
    words = ["--distances", "10", "40", "--episodes", "3", "--tasks", "copy", "induction"]
    program.main(["measure", str(run), *words, "--json", str(result)])
    (model,) = json.loads(result.read_text())["models"]
    assert [(x["task"], x["distance"], x["n_answers"]) for x in model["results"]] == [
        ("copy", 10, 24), ("copy", 40, 24), ("induction", 10, 3), ("induction", 40, 3)
    ]  # fmt: skip
    assert f"| copy | {run} | 10 | " in capsys.readouterr().out
