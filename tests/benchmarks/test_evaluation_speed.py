"""The program that measures the paper's Table 9, and the counts of operations."""

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def program(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return import_module("evaluation_speed")


def test_both_methods_are_timed_in_turns_at_each_length(
    program: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    order = []
    for name in ("window_step", "memory_step"):
        make = getattr(program, name)

        def noting(model, attn_len, *rest, name=name, make=make):
            step, B = make(model, attn_len, *rest), rest[-2]
            return lambda: (order.append((name, B)), step())

        monkeypatch.setattr(program, name, noting)
    path = tmp_path / "found.json"
    words = ["--attn_lens", "5", "800", "--segment_len", "8", "--windows", "1", "2"]
    words += ["--batch_size", "3", "--rounds", "1", "--json", str(path)]
    words += ["--n_layer", "2", "--d_model", "16", "--n_head", "2", "--d_inner", "16"]
    monkeypatch.setattr(sys, "argv", ["evaluation_speed.py", *words])
    monkeypatch.setattr(program, "prepare_process", lambda: None)
    program.main()
    turn = [*[("memory_step", 3)] * 5, ("window_step", 1), ("window_step", 2)]
    assert order == ([("memory_step", 3)] * 2 + turn * 2) * 2
    found = json.loads(path.read_text())
    assert [row["attn_len"] for row in found["rows"]] == [5, 800]
    assert [row["paper"] for row in found["rows"]] == [None, 363]
    assert (found["n_layer"], found["dtype"]) == (2, "float32")
    for row in found["rows"]:
        ratio = row["window"]["seconds"] / row["memory"]["seconds"]
        assert row["slowdown"] == pytest.approx(ratio)
    assert "| 800 |" in capsys.readouterr().out
    recorded = import_module("record").recorded(path)
    assert (recorded["kind"], recorded["rows"]) == ("evaluation_speed", found["rows"])


def test_a_window_step_predicts_as_many_tokens_as_it_is_counted_for(
    program: ModuleType,
) -> None:
    model = replace(program.ENWIK8, n_layer=1, d_model=16, n_head=2, d_inner=16)
    for B in (1, 4):
        (nll,) = program.window_step(model, 5, B, CPU)()
        assert nll.shape == (B, 1)


def test_the_operations_of_one_shape_are_those_counted_by_hand(program: ModuleType) -> None:
    shapes = import_module("shapes")
    shape = shapes.Shape(3, 16, 2, 24, length=1, mem_len=5, batch=2, vocab=60)
    # A layer for one token: four projections, the feed-forward, three products with 6 keys.
    token = 4 * 16 * 16 + 2 * 16 * 24 + 3 * 16 * 6
    # Keys and values of the memory for each stream, positions once.
    memory = 2 * (5 * 2 * 16 * 16) + 6 * 16 * 16
    softmax = 2 * 16 * 60
    training = 2 * (3 * (3 * 2 * token + 2 * memory) + 3 * softmax)
    assert shapes.step_flops("training", shape) == training
    assert shapes.step_flops("generation", shape) == 2 * (3 * 2 * token + softmax)
