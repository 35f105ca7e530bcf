"""What is measured of a contestant, on toy models that are really trained."""

from dataclasses import replace

import pytest

from transformer_xl.inference.evaluate import WithMemory, evaluate
from transformer_xl.model import build_model, load_model
from transformer_xl.ops import timing
from transformer_xl.studies import contestant
from transformer_xl.studies.compare import Comparison, Plan, recipe_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(timing, "CEILING_WIDTH", {"cpu": 64})
    monkeypatch.setattr(contestant, "CONTEXTS", (0, 8, 32))
    monkeypatch.setattr(contestant, "WRITTEN", (10, 50))
    monkeypatch.setattr(contestant, "_STEPS", 2)


@pytest.fixture
def contestants(models):
    """The toy models, and others: what is read again, and recurrence of the inputs."""
    window = replace(models["gpt"].model, mem_len=0)
    # Eight tokens are read again for every eight that are predicted.
    read_again = replace(models["gpt"].eval, segment_len=8, ext_len=8)
    modern = {"embedding_residual": True, "input_recurrence": True, "norm_first": True}
    return {
        **models,
        "window": replace(models["gpt"], model=window, eval=read_again),
        "modern-xl": replace(models["txl"], model=replace(models["txl"].model, **modern)),
    }


def short(recipe, data):
    return recipe_of(recipe, data, steps=6, factor=1.0, seed=1)


@pytest.mark.parametrize(
    "kind",
    [
        *("txl", "gpt", "lstm"),
        # Slow to read again what was read.
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("window", "modern-xl")),
    ],
)
def test_a_contestant_is_trained_and_measured(tmp_path, contestants, kind):
    config = short(contestants[kind], contestants["txl"].data)
    found = contestant.measured(config, tmp_path / "run")
    corpus = contestant.prepare(config.data, lambda _: None)
    model = load_model(tmp_path / "run" / "model" / "best")
    training, test = found["training"], found["test"]
    assert training["steps"] == 6
    assert training["tokens"] == 6 * config.train.batch_size * config.train.segment_len
    assert training["parameters"] == sum(p.numel() for p in model.parameters())
    mem_len = test["mem_len"] if config.model.mem_len else None
    expected = evaluate(
        model,
        corpus.split(test["split"]),
        WithMemory(
            batch_size=config.eval.batch_size,
            segment_len=config.eval.segment_len or config.train.segment_len,
            mem_len=mem_len,
            ext_len=config.eval.ext_len,
        ),
    )
    assert test["nll"] == pytest.approx(expected.nll)
    assert (test["mem_len"], test["ext_len"]) == (mem_len or 0, config.eval.ext_len or 0)
    has_state = kind == "lstm"
    assert [row["context"] for row in found["by_mem_len"]] == ([] if has_state else [0, 8, 32])
    assert found["from_start"][0]["first"] == 1
    # A state has one size; the others fill their memory, or a context of the length of training.
    sizes = [row["state_bytes"] for row in found["writing"]]
    assert (sizes[0] == sizes[1]) == (has_state or (mem_len or config.train.segment_len) <= 10)
    for row in found["writing"]:
        own, called = row["ms_per_token"], row["ms_called"]
        assert min(own, called) > 0
        assert (own == called) == (row["step"] == "eager")


def test_details_are_of_as_many_tokens_as_the_losses(tmp_path, models, monkeypatch):
    config, read = short(models["txl"], models["txl"].data), []
    loss_from_start = contestant.loss_from_start

    def noted(model, ids, **lengths):
        read.append(len(ids))
        return loss_from_start(model, ids, **lengths)

    monkeypatch.setattr(contestant, "loss_from_start", noted)
    found = contestant.measured(config, tmp_path / "all", n_tokens=20)
    assert {*read} == {21}
    assert found["valid"]["tokens"] == found["test"]["tokens"] == 20
    alone = contestant.measured(config, tmp_path / "alone", n_tokens=20, is_detailed=False)
    assert found.keys() - alone.keys() == {"by_mem_len", "from_start", "writing"}


def test_flops_of_an_lstm_are_those_of_its_matrices(models):
    two_layers = replace(models["lstm"].model, n_layer=2, vocab_size=20)
    config = replace(models["lstm"], model=two_layers)
    model = build_model(config.model)
    D, V = config.model.d_model, config.model.vocab_size
    # Twice a multiplication, forward and for both gradients; the embedding is looked up.
    expected = 6 * (2 * 8 * D * D + V * D)
    # AdamW has no products.
    of_token, of_update = contestant.training_flops(config, model)
    assert (of_token, of_update) == (pytest.approx(expected, rel=0.05), 0)


@pytest.fixture
def sized(models):
    """Return a function that makes a recipe wide enough for the kernels of a real training."""

    def recipe(kind, **settings):
        own = models["txl" if kind == "transformer_xl" else kind]
        settings = {"d_model": 128, "n_head": 4, "d_inner": 512, "mem_len": 64} | settings
        model = replace(own.model, n_layer=2, vocab_size=64, **settings)
        train = replace(own.train, segment_len=64, batch_size=8)
        return replace(own, model=model, train=train)

    return recipe


def test_flops_of_a_transformer_xl_include_its_memory_and_the_positions(sized):
    config = sized("transformer_xl", norm_first=True)
    D, F, T, M, B, n = 128, 512, 64, 64, 8, 2
    inside = n * (4 * D * D + 2 * D * F) + 64 * D
    # Contents, positions and values; the first two are computed again in the backward pass.
    scores = n * (M + T) * D * (3 * 6 + 2 * 2)
    # Keys and values; the weights of the normalization before them need the gradient of both.
    memory = n * 6 * 2 * D * D * M / T
    # They have no gradient.
    positions = n * 4 * (M + T) * D * D / (B * T)
    of_token, _ = contestant.training_flops(config, build_model(config.model))
    assert of_token == pytest.approx(6 * inside + scores + memory + positions, rel=0.001)


def test_flops_of_muon_count_for_each_update(models):
    recipe = models["gpt"]
    muon = replace(recipe, train=replace(recipe.train, optimizer="muon"))
    model = build_model(replace(recipe.model, vocab_size=20))
    (of_token, none), (same, of_update) = (
        contestant.training_flops(x, model) for x in (recipe, muon)
    )
    assert (of_token, none) == (same, 0)
    # Five iterations, each with more than one product of the size of each matrix.
    D, F = model.config.d_model, model.config.d_inner
    assert of_update > 5 * 2 * (4 * D**3 + 2 * D * D * min(D, F))


@pytest.mark.slow
def test_runs_are_made_in_processes_of_their_own(tmp_path, models):
    models = {name: short(models[name], models["txl"].data) for name in ("txl", "lstm")}
    plan = Plan(data=models["txl"].data, models=models, minutes=0.02, factors=(1.0,), jobs=2)
    comparison = Comparison(plan, tmp_path)
    comparison.go()
    runs = comparison.planned()
    assert {run.model for run in runs} == {"txl", "lstm"}
    assert not [run.found["failed"] for run in runs if "failed" in run.found]
