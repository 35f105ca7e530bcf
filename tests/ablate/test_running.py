from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from transformer_xl.config import Config, ModelConfig
from transformer_xl.model import TransformerXL
from transformer_xl.studies.ablate import Plan, ablate, attention_length_nll, rows_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def plan(toy_recipe: Callable[..., Config]) -> Plan:
    recipe = toy_recipe(train={"steps": 3}, generate={"prompt": "the "})
    rows = rows_of(6, ["recurrence-ours-full", "none-learned-half"])
    return Plan(recipe=recipe, rows=tuple(rows), seeds=(1, 2), attn_lens=(4, 9), tokens=120)


@pytest.mark.slow
def test_each_row_is_a_run_that_is_not_made_twice(plan: Plan, tmp_path: Path) -> None:
    first = ablate(plan, tmp_path, lambda _: None)
    assert [(run.row, run.seed) for run in first] == [
        ("recurrence-ours-full", 1),
        ("none-learned-half", 1),
        ("recurrence-ours-full", 2),
        ("none-learned-half", 2),
    ]
    for run in first:
        trained = 16 if run.row.startswith("recurrence") else 8
        assert [x.attn_len for x in run.lengths] == sorted({4, 9, trained})
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    # What was made is left as it is, and a row more is made beside it.
    more = replace(plan, rows=(*plan.rows, *rows_of(6, ["none-ours-full"])), seeds=(1, 2))
    second = ablate(more, tmp_path, lambda _: None)
    assert [run for run in second if run.row != "none-ours-full"] == first
    assert all(path.stat().st_mtime_ns == time for path, time in files.items())
    # Other lengths are measured anew, without training.
    third = ablate(replace(plan, attn_lens=(5,)), tmp_path, lambda _: None)
    assert third[0].lengths[-1] == first[0].lengths[-1]
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert all(path.stat().st_mtime_ns == files[path] for path in weights)


@pytest.mark.slow
def test_another_text_is_not_taken_for_the_one_that_was_measured(
    plan: Plan, tmp_path: Path
) -> None:
    plan = replace(plan, rows=plan.rows[:1], seeds=(1,))
    ablate(plan, tmp_path / "runs", lambda _: None)
    text = Path(plan.recipe.data.path).read_text()
    (tmp_path / "other.txt").write_text(text[::-1])
    other = replace(plan.recipe.data, path=str(tmp_path / "other.txt"))
    again = replace(plan, recipe=replace(plan.recipe, data=other))
    with pytest.raises(ValueError, match="the text is not the one that the run began with"):
        ablate(again, tmp_path / "runs", lambda _: None)


def test_a_folder_of_another_recipe_is_named_before_anything_runs(
    plan: Plan, tmp_path: Path
) -> None:
    last = tmp_path / "none-learned-half" / "seed_2"
    last.mkdir(parents=True)
    (last / "something").touch()
    with pytest.raises(FileExistsError, match="is no run folder"):
        ablate(plan, tmp_path, lambda _: None)
    assert not (tmp_path / "recurrence-ours-full").exists()


def test_without_recurrence_no_token_sees_more_than_the_length(tiny_config: ModelConfig) -> None:
    model = TransformerXL(replace(tiny_config, mem_len=0, init_std=0.3)).eval()
    text = torch.randint(31, (21,))
    found = attention_length_nll(model, text, attn_len=8, segment_len=8)
    # By hand: two tokens at a time, each with a window that ends behind the second.
    total = 0.0
    with torch.no_grad():
        for start in range(0, 20, 2):
            window = text[max(0, start - 6) : start + 2][None]
            out = model(window)
            for i in (0, 1):
                total -= float(out.log_probs[0, i - 2, text[start + i + 1]])
    assert found == pytest.approx(total / 20, rel=1e-5)


def test_with_recurrence_a_length_is_a_count_of_keys(tiny_config: ModelConfig) -> None:
    model = TransformerXL(replace(tiny_config, n_layer=1, init_std=0.3)).eval()
    text = torch.randint(31, (30,))
    found = attention_length_nll(model, text, attn_len=4, segment_len=5)
    total = 0.0
    with torch.no_grad():
        # With one layer, the keys a token sees are the text it depends on.
        for place in range(29):
            out = model(text[max(0, place - 3) : place + 1][None])
            total -= float(out.log_probs[0, -1, text[place + 1]])
    assert found == pytest.approx(total / 29, rel=1e-4)


def test_a_plan_that_cannot_be_is_refused(plan: Plan) -> None:
    with pytest.raises(ValueError, match=r"seeds=\(1, 1\) must be different"):
        replace(plan, seeds=(1, 1))
    with pytest.raises(ValueError, match="attn_lens"):
        replace(plan, attn_lens=(0,))
    with pytest.raises(ValueError, match="tokens=1 must be at least 2"):
        replace(plan, tokens=1)
