"""Which runs a comparison makes, with which settings, and that none is made twice."""

from dataclasses import replace

import pytest

from transformer_xl.config.recipes import recipe_text
from transformer_xl.model.limits import least_weights
from transformer_xl.studies import compare
from transformer_xl.studies.compare import Comparison, Plan, load_contestants


def plan(models, **settings):
    return Plan(data=models["txl"].data, models=models, minutes=8.0, **settings)


def test_learning_rates_are_searched_in_a_quarter_of_the_time_and_the_best_is_trained(
    tmp_path, models, made
):
    Comparison(plan(models, seeds=(1, 2)), tmp_path).go()
    search = [task for task in made if task.phase == "search"]
    final = made[len(search) :]
    assert {(x.model, x.factor) for x in search} == {
        (model, factor) for model in models for factor in compare.FACTORS
    }
    assert {(x.minutes, x.config.train.steps) for x in search} == {(2.0, 240)}
    assert [(x.phase, x.model, x.seed, x.factor) for x in final] == [
        ("run", model, seed, 2.0) for seed in (1, 2) for model in models
    ]
    assert {(x.minutes, x.config.train.steps) for x in final} == {(8.0, 960)}
    # Only the first seed is measured in every way.
    assert [x.is_detailed for x in final] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("best", "beyond"),
    [(2.0, []), (8.0, [8.0, 16.0]), (64.0, [8.0, 16.0, 32.0]), (0.25, [0.125, 0.25])],
)
def test_the_search_goes_on_while_the_best_rate_is_at_its_edge(
    tmp_path, models, made, monkeypatch, best, beyond
):
    carry_out = compare._carry_out

    def with_best(task):
        # gpt has its best rate at 2, as in the fixture.
        factor = task.factor * 2 / best if task.model == "txl" else task.factor
        return carry_out(replace(task, factor=factor))

    monkeypatch.setattr(compare, "_carry_out", with_best)
    comparison = Comparison(plan({name: models[name] for name in ("txl", "gpt")}), tmp_path)
    comparison.go()
    found = {name: [x.factor for x in comparison.search_of(name)] for name in ("txl", "gpt")}
    assert found == {"txl": sorted([*compare.FACTORS, *beyond]), "gpt": [*compare.FACTORS]}
    assert comparison.factor("txl") == min(best, 32.0)
    assert {x.factor for x in comparison.planned() if x.phase == "run" and x.model == "txl"} == {
        min(best, 32.0)
    }


def test_a_schedule_that_follows_evaluations_is_refused(models):
    train = replace(models["gpt"].train, schedule="plateau", eval_every=5)
    models["gpt"] = replace(models["gpt"], train=train)
    with pytest.raises(ValueError, match=r"gpt: train\.schedule='plateau' needs evaluations"):
        plan(models)


@pytest.mark.parametrize("changed", [{"max_steps": 3}, {"window": 8}])
def test_a_measurement_that_others_do_not_have_is_refused(models, changed):
    ((name, x),) = changed.items()
    models["gpt"] = replace(models["gpt"], eval=replace(models["gpt"].eval, **changed))
    with pytest.raises(ValueError, match=rf"gpt: eval\.{name}={x} would measure it otherwise"):
        plan(models)


def test_two_processes_keep_the_runs_of_each_other(tmp_path, models, made):
    both = [Comparison(plan(models, factors=(1.0,), seeds=(seed,)), tmp_path) for seed in (1, 2)]
    for comparison in both:
        comparison.go()
    assert len(made) == 2 * len(models)
    known = {run.digest for run in Comparison(both[0].plan, tmp_path).runs}
    assert {task.digest for task in made} < known


def test_runs_that_have_ended_are_not_made_again(tmp_path, models, made):
    Comparison(plan(models), tmp_path).go()
    n = len(made)
    again = Comparison(plan(models), tmp_path)
    again.go()
    assert len(made) == n
    assert len(again.planned()) == n + len(models)
    # Another seed needs its own long runs alone.
    Comparison(plan(models, seeds=(1, 2)), tmp_path).go()
    assert [(task.phase, task.seed) for task in made[n:]] == [("run", 2)] * 3


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


def test_an_interrupt_keeps_the_runs_that_have_ended(tmp_path, models, made, monkeypatch):
    carry_out = compare._carry_out

    def interrupted(task):
        if len(made) == 4:
            raise KeyboardInterrupt
        return carry_out(task)

    monkeypatch.setattr(compare, "_carry_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Comparison(plan(models), tmp_path).go()
    monkeypatch.setattr(compare, "_carry_out", carry_out)
    Comparison(plan(models), tmp_path).go()
    assert len(made) == 3 * (len(compare.FACTORS) + 1)


def test_a_run_that_failed_is_tried_again_and_one_that_diverged_is_not(
    tmp_path, models, made, monkeypatch
):
    carry_out = compare._carry_out

    def failing(task):
        if task.model == "gpt":
            made.append(task)
            raise OSError("the disk is full")
        if task.factor == 4:
            made.append(task)
            return {"failed": "the loss is not finite", "diverged": True}
        return carry_out(task)

    monkeypatch.setattr(compare, "_carry_out", failing)
    first = Comparison(plan(models), tmp_path)
    first.go()
    failed = [run for run in first.planned() if "failed" in run.found]
    assert {run.found["failed"] for run in failed} == {
        "OSError: the disk is full",
        "the loss is not finite",
    }
    n = len(made)
    monkeypatch.setattr(compare, "_carry_out", carry_out)
    again = Comparison(plan(models), tmp_path)
    again.go()
    assert {task.model for task in made[n:]} == {"gpt"}
    assert [run for run in again.planned() if run.phase == "run" and run.model == "gpt"]


def test_a_contestant_that_comes_later_is_measured_in_turns_with_the_others(
    tmp_path, models, made, monkeypatch
):
    measured, paces = [], compare.paces

    def noted(configs, limit):
        measured.append([*configs])
        seconds, peak = paces(configs, limit)
        # The machine is slower each time.
        return {name: [len(measured) * x for x in each] for name, each in seconds.items()}, peak

    monkeypatch.setattr(compare, "paces", noted)
    two = {name: models[name] for name in ("txl", "lstm")}
    Comparison(plan(two, factors=(1.0,)), tmp_path).go()
    Comparison(plan(two, factors=(1.0,), seeds=(1, 2)), tmp_path).go()
    n = len(made)
    Comparison(plan(models, factors=(1.0,)), tmp_path).go()
    assert measured == [["txl", "lstm"], ["txl", "gpt", "lstm"]]
    # The runs of the others stay, and the new one is compared with them.
    assert {(task.model, task.config.train.steps) for task in made[n:]} == {("gpt", 960)}


def test_a_copy_of_a_recipe_is_a_contestant_of_its_own(tmp_path, models, made):
    two = {"txl": models["txl"]}
    Comparison(plan(two, factors=(1.0,)), tmp_path).go()
    two["gpt"] = models["txl"]
    comparison = Comparison(plan(two, factors=(1.0,)), tmp_path)
    comparison.go()
    assert [task.model for task in made] == ["txl", "gpt"]
    assert made[0].digest == made[1].digest
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
        ({"jobs": 0}, "jobs=0 must be at least 1"),
        ({"search_minutes": 0.0}, "minutes"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(models, **settings)


def test_every_contestant_has_a_recipe_with_as_many_weights():
    models = load_contestants(compare.contestants())
    assert {"txl", "txl-paper", "gpt", "gpt-cache", "lstm", "mamba2"} <= models.keys()
    Plan(data=models["txl"].data, models=models)
    for name, config in models.items():
        tables = config.model.vocab_size * config.model.d_model * (2 - config.model.tie_embeddings)
        inside = least_weights(config.model) - tables
        assert 1.4e6 < inside < 1.9e6, name


def test_contestants_are_found_by_their_names_or_files(tmp_path):
    own = tmp_path / "mine.toml"
    own.write_text(recipe_text("compare-gpt"))
    assert [*load_contestants(["gpt", str(own)])] == ["gpt", "mine"]
    with pytest.raises(ValueError, match=r"'gpr'.*contestants are modern-xl, gpt, gpt-cache"):
        load_contestants(["gpr"])
    with pytest.raises(ValueError, match="gpt is given twice"):
        load_contestants(["gpt", "gpt"])


def test_nothing_is_trained_after_a_search_that_lacks_a_run(tmp_path, models, made, monkeypatch):
    carry_out = compare._carry_out

    def failing(task):
        if task.factor == 2.0:
            raise OSError("the disk is full")
        return carry_out(task)

    monkeypatch.setattr(compare, "_carry_out", failing)
    comparison = Comparison(plan(models), tmp_path)
    comparison.go()
    assert not [task for task in made if task.phase == "run"]
    monkeypatch.setattr(compare, "_carry_out", carry_out)
    Comparison(plan(models), tmp_path).go()
    assert {task.factor for task in made if task.phase == "run"} == {2.0}


def test_all_read_the_same_text_with_their_own_network(tmp_path, models, made):
    other = replace(models["lstm"].data, vocab="chars")
    models["lstm"] = replace(models["lstm"], data=other)
    Comparison(plan(models), tmp_path).go()
    assert {task.config.data for task in made} == {models["txl"].data}
    for task in made:
        own = models[task.model]
        assert task.config.model == own.model
        assert task.config.train.lr == own.train.lr * task.factor
        assert task.config.train.eval_every == 0


def test_a_factor_scales_the_rate_of_muon_too(models):
    recipe = models["txl"]
    muon = replace(recipe, train=replace(recipe.train, optimizer="muon", muon_lr=0.04))
    train = compare.recipe_of(muon, recipe.data, steps=70, factor=0.5, seed=3).train
    assert (train.muon_lr, train.lr, train.seed, train.steps) == (0.02, 0.005, 3, 70)
