"""Which runs a comparison makes, with which settings, and that none is made twice."""

from dataclasses import asdict, replace

import pytest

from transformer_xl.config.recipes import recipe_text
from transformer_xl.inference.evaluate import ngram_cache
from transformer_xl.model.limits import least_weights
from transformer_xl.studies import compare
from transformer_xl.studies.compare import Comparison, Plan, load_contestants
from transformer_xl.train import Diverged, Interrupted


def plan(models, **settings):
    return Plan(data=models["txl"].data, models=models, minutes=8.0, **settings)


def test_learning_rates_are_searched_in_a_quarter_of_the_time_and_the_best_is_trained(
    tmp_path, models, made
):
    Comparison(plan(models, seeds=(1, 2)), tmp_path).go()
    n = len(models) * len(compare.FACTORS)
    search, final = made[:n], made[n:]
    assert {(x.run.phase, x.run.model, x.run.factor) for x in search} == {
        ("search", model, factor) for model in models for factor in compare.FACTORS
    }
    assert {(x.run.minutes, x.config.train.steps) for x in search} == {(2.0, 240)}
    assert [(x.run.phase, x.run.model, x.run.seed, x.run.factor) for x in final] == [
        ("run", model, seed, 2.0) for seed in (1, 2) for model in models
    ]
    assert {(x.run.minutes, x.config.train.steps) for x in final} == {(8.0, 960)}


@pytest.mark.parametrize("factors", [(0.25, 0.5), (8.0, 16.0), (0.5, 1.0, 2.0)])
def test_the_search_goes_on_beyond_its_edges(tmp_path, models, made, factors):
    """The loss is lowest at a factor of 2."""
    comparison = Comparison(plan({"txl": models["txl"]}, factors=factors), tmp_path)
    comparison.go()
    *search, final = made
    assert {1.0, 2.0, 4.0} <= {x.run.factor for x in search}
    assert len(search) == len({x.run.factor for x in search} | {*factors})
    assert final.run.factor == comparison.factor("txl") == 2.0
    n = len(made)
    Comparison(comparison.plan, tmp_path).go()
    assert len(made) == n


def test_runs_that_have_ended_are_not_made_again(tmp_path, models, made):
    Comparison(plan(models), tmp_path).go()
    n = len(made)
    again = Comparison(plan(models), tmp_path)
    again.go()
    assert len(made) == n
    assert len(again.planned()) == n + len(models)
    # Another seed needs its own long runs alone.
    Comparison(plan(models, seeds=(1, 2)), tmp_path).go()
    assert [(task.run.phase, task.run.seed) for task in made[n:]] == [("run", 2)] * 3


@pytest.mark.parametrize("changed", ["model", "eval_tokens", "reset_at", "completion_at"])
def test_runs_with_other_settings_are_made(tmp_path, models, made, changed):
    before = plan(models, factors=(1.0,))
    Comparison(before, tmp_path).go()
    n, deeper = len(made), replace(models["txl"].model, n_layer=models["txl"].model.n_layer + 1)
    other = {
        "model": {"models": models | {"txl": replace(models["txl"], model=deeper)}},
        "eval_tokens": {"eval_tokens": 100},
        "reset_at": {"data": replace(before.data, reset_at="e")},
        "completion_at": {"data": replace(before.data, reset_at="e", completion_at="t")},
    }
    Comparison(replace(before, **other[changed]), tmp_path).go()
    assert len(made) - n == (1 if changed == "model" else 3)
    assert len({task.folder for task in made}) == (3 if changed == "eval_tokens" else len(made))


@pytest.fixture
def failing(monkeypatch, made):
    """Let runs fail as a function of their task says, while it is in the list."""
    errors = []
    measured = compare.measured

    def failing(config, folder, **more):
        found = measured(config, folder, **more)
        for error in errors:
            error(made[-1])
        return found

    monkeypatch.setattr(compare, "measured", failing)
    return errors


@pytest.mark.parametrize("error", [KeyboardInterrupt, Interrupted(2, "at step 3")])
def test_an_interrupt_keeps_the_runs_that_have_ended(tmp_path, models, made, failing, error):
    def interrupt(task):
        if len(made) == 5:
            raise error

    failing.append(interrupt)
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        Comparison(plan(models), tmp_path).go()
    failing.clear()
    Comparison(plan(models), tmp_path).go()
    assert len(made) == 3 * (len(compare.FACTORS) + 1) + 1


def test_a_run_that_failed_is_tried_again_and_one_that_diverged_is_not(
    tmp_path, models, made, failing
):
    def fail(task):
        if task.run.model == "gpt":
            raise OSError("the disk is full")
        if task.run.factor == 4:
            raise Diverged("the loss is not finite")

    failing.append(fail)
    first = Comparison(plan(models), tmp_path)
    first.go()
    failed = [run for run in first.planned() if "failed" in run.found]
    assert {run.found["failed"] for run in failed} == {
        "OSError: the disk is full",
        "the loss is not finite",
    }
    # After a search that lacks a run, nothing is trained.
    assert {task.run.model for task in made if task.run.phase == "run"} == {"txl", "lstm"}
    n = len(made)
    failing.clear()
    again = Comparison(plan(models), tmp_path)
    again.go()
    assert {task.run.model for task in made[n:]} == {"gpt"}
    assert [run for run in again.planned() if run.phase == "run" and run.model == "gpt"]


def test_a_rate_beyond_the_given_ones_may_fail(tmp_path, models, made, failing):
    def fail(task):
        if task.run.factor == 2:
            raise OSError("the disk is full")

    failing.append(fail)
    Comparison(plan({"txl": models["txl"]}, factors=(0.5, 1.0)), tmp_path).go()
    assert [task.run.factor for task in made if task.run.phase == "run"] == [1.0]


def test_a_text_too_long_to_be_counted_is_compared_without_counts(
    tmp_path, models, made, monkeypatch
):
    monkeypatch.setattr(ngram_cache, "BYTES", 1 << 60)
    said = []
    Comparison(plan({"txl": models["txl"]}, factors=(1.0,)), tmp_path, said.append).go()
    assert any("without counts: " in x and "the n-gram cache" in x for x in said), said
    assert {task.config.eval.ngram_cache for task in made} == {None}


def test_a_copy_of_a_recipe_is_a_contestant_of_its_own(tmp_path, models, made):
    two = {"txl": models["txl"]}
    Comparison(plan(two, factors=(1.0,)), tmp_path).go()
    two["gpt"] = models["txl"]
    comparison = Comparison(plan(two, factors=(1.0,)), tmp_path)
    comparison.go()
    assert [task.run.model for task in made] == ["txl", "gpt"]
    assert made[0].run.digest == made[1].run.digest
    assert made[0].folder != made[1].folder
    runs = [run for run in comparison.planned() if run.phase == "run"]
    assert [run.model for run in runs] == ["txl", "gpt"]


def test_a_damaged_file_of_runs_is_named_and_left_as_it_is(tmp_path, models):
    (tmp_path / compare.RUNS_FILE).write_text("[{]")
    with pytest.raises(ValueError, match=r"runs\.json is damaged, or no file of runs"):
        Comparison(plan(models), tmp_path)
    assert (tmp_path / compare.RUNS_FILE).read_text() == "[{]"


def test_a_plan_that_cannot_be_is_refused(models):
    for settings, message in (
        ({"seeds": ()}, r"seeds=\(\) must be different, and at least one"),
        ({"seeds": (1, 1)}, r"seeds=\(1, 1\) must be different"),
        ({"factors": (0.0, 1.0)}, r"factors=\(0\.0, 1\.0\) must be above 0"),
        ({"search_minutes": 0.0}, "minutes"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(models, **settings)


def test_every_contestant_has_a_recipe_with_as_many_weights():
    models = load_contestants(compare.contestants())
    assert {"txl", "txl-paper", "gpt", "gpt-modern", "lstm"} <= models.keys()
    Plan(data=models["txl"].data, models=models)
    for name, config in models.items():
        tables = config.model.vocab_size * config.model.d_model * (2 - config.model.tie_embeddings)
        inside = least_weights(config.model) - tables
        assert 1.4e6 < inside < 1.9e6, name


def test_a_gpt_has_the_settings_of_modern_xl_that_it_can_have():
    gpt, ours = (asdict(x) for x in load_contestants(["gpt-modern", "modern-xl"]).values())
    others = {"kind", "input_recurrence", "norm_first", "final_norm", "attn_len"}
    # Its first layer sees less, as when it was measured (docs/which-model.md).
    others |= {"layer_attn_lens"}
    assert gpt["model"]["layer_attn_lens"][-1] == ours["model"]["attn_len"]
    for section, own in {"model": others, "train": set()}.items():
        names = gpt[section].keys() & ours[section].keys() - own
        assert {x: gpt[section][x] for x in names} == {x: ours[section][x] for x in names}


def test_contestants_are_found_by_their_names_or_files(tmp_path):
    own = tmp_path / "mine.toml"
    own.write_text(recipe_text("compare-gpt"))
    assert [*load_contestants(["gpt", str(own)])] == ["gpt", "mine"]
    with pytest.raises(ValueError, match=r"'gpr'.*contestants are modern-xl, gpt, gpt-modern"):
        load_contestants(["gpr"])
    with pytest.raises(ValueError, match=r"^lstm: key_offset=True has no effect"):
        load_contestants(["gpt", "lstm"], {"model": {"key_offset": True}})
    with pytest.raises(ValueError, match="gpt is given twice"):
        load_contestants(["gpt", "gpt"])


def test_all_read_the_same_text_with_their_own_network(tmp_path, models, made):
    other = replace(models["lstm"].data, vocab="chars")
    models["lstm"] = replace(models["lstm"], data=other)
    Comparison(plan(models), tmp_path).go()
    assert {task.config.data for task in made} == {models["txl"].data}
    for task in made:
        own = models[task.run.model]
        assert task.config.model == own.model
        assert task.config.train.lr == own.train.lr * task.run.factor
        assert task.config.train.eval_every == 0


def test_a_factor_scales_the_rate_of_muon_too(models):
    recipe = models["txl"]
    muon = replace(recipe, train=replace(recipe.train, optimizer="muon", muon_lr=0.04))
    train = compare.plan_training(muon, recipe.data, steps=70, factor=0.5, seed=3).train
    assert (train.muon_lr, train.lr, train.seed, train.steps) == (0.02, 0.005, 3, 70)
