"""What is concluded from the runs of a comparison."""

import math
from functools import partial

import pytest

from transformer_xl.studies.compare import Run
from transformer_xl.studies.standings import (
    draw,
    flops,
    loss_at,
    markdown,
    standings,
    tokens,
)


@pytest.fixture(name="run")
def _run(found):
    """Return a function that makes a run of a model."""
    return partial(_made, found)


@pytest.fixture
def power_law(run):
    """Return runs of a search and of a training whose loss is a power of the tokens."""

    def runs(model, scale, **about):
        return [
            run(model, scale * n**-0.2, phase=phase, tokens=n, **about)
            for phase, n in (("search", 1000.0), ("run", 4000.0))
        ]

    return runs


def _made(found, model, nll, *, phase="run", factor=1.0, seed=1, **about):
    values = found(nll, **about) if nll is not None else {"failed": "ValueError: it diverged"}
    return Run(
        model=model, phase=phase, factor=factor, seed=seed, digest=f"{model}{seed}{phase}{factor}",
        minutes=1.0, found=values,
    )  # fmt: skip


def test_models_are_ranked_by_the_mean_over_seeds(run):
    runs = [run("a", 2.0), run("a", 2.2, seed=2), run("b", 1.9), run("b", 2.1, seed=2)]
    result = standings(runs)
    assert [row["model"] for row in result["models"]] == ["b", "a"]
    best = result["models"][0]
    assert best["mean"] == pytest.approx(2.0 / math.log(2))
    assert best["std"] == pytest.approx(0.2 / math.sqrt(2) / math.log(2))
    assert best["seeds"] == [1, 2]


def test_the_loss_with_counts_is_that_of_the_counts(run):
    runs = [run("a", 2.0), run("a", 2.4, seed=2)]
    result = standings(runs)
    (row,) = result["models"]
    assert row["with_counts"] == pytest.approx(row["mean"] / 2)
    assert f"{row['with_counts']:.4f}" in markdown(result)
    del runs[1].found["with_counts"]
    assert standings(runs)["models"][0]["with_counts"] is None


def test_the_others_are_compared_at_the_cost_of_the_cheapest(run):
    runs = [run("gpt", 2.0, tokens=4000.0), run("big", 2.0, tokens=9000.0)]
    assert standings(runs)["reference"] == "gpt"


def test_a_power_law_is_met_at_every_cost_between_its_runs(power_law):
    for n in (1000.0, 1500.0, 4000.0):
        curve = power_law("a", 10.0)
        expected = 10.0 * n**-0.2 / math.log(2)
        assert loss_at(n, curve, tokens, "bits per byte") == pytest.approx(expected), n
        assert loss_at(2e6 * n, curve, flops, "bits per byte") == pytest.approx(expected), n


def test_nothing_is_said_beyond_what_was_trained(power_law):
    for n in (500.0, 8000.0):
        assert loss_at(n, power_law("a", 10.0), tokens, "bits per byte") is None, n


def test_a_failed_run_is_named_and_not_counted(run):
    result = standings([run("a", 2.0), run("a", None, seed=2), run("b", None)])
    assert [row["model"] for row in result["models"]] == ["a"]
    assert result["models"][0]["seeds"] == [1]
    assert "b, seed 1, failed: ValueError: it diverged" in markdown(result)


def test_baselines_stand_below_with_what_they_were_given(run):
    rows = [
        {"name": "gzip -9", "trained": False, "bits": 2.04},
        {"name": "PPMd", "trained": True, "bits": 1.26},
    ]
    lines = markdown(standings([run("a", 1.0)]), rows).splitlines()
    assert lines[3].startswith("| PPMd, given the training text | 1.2600 |")
    assert lines[4].startswith("| gzip -9 | 2.0400 |")
    # Every row has as many cells.
    assert len({line.count("|") for line in lines[:5]}) == 1


def test_a_picture_is_drawn_of_whatever_was_measured(run, power_law, tmp_path):
    pytest.importorskip("matplotlib")
    draw(tmp_path / "found.svg", [*power_law("a", 10.0), run("b", 2.0)])
    assert (tmp_path / "found.svg").read_text().startswith("<?xml")


def test_a_search_counts_with_the_chosen_learning_rate_only(run, power_law):
    own, other = power_law("a", 10.0), run("b", 3.0, tokens=2000.0)
    bent = run("a", 99.0, phase="search", factor=4.0, tokens=1000.0)
    found = {row["model"]: row for row in standings([*own, bent, other])["models"]}
    expected = loss_at(2000.0, own, tokens, "bits per byte")
    assert found["a"]["at_tokens"] == expected
    assert loss_at(2000.0, [*own, bent], tokens, "bits per byte") != expected
