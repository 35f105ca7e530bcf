"""What is measured of a contestant, on toy models that are really trained."""

import math
from dataclasses import replace

import pytest

from transformer_xl.inference.evaluate import (
    NGramMixture,
    SortedContexts,
    WithMemory,
    evaluate,
)
from transformer_xl.model import build_model, load_model
from transformer_xl.studies import contestant
from transformer_xl.studies.compare import plan_training

pytestmark = pytest.mark.usefixtures("one_thread")


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
    return plan_training(recipe, data, steps=6, factor=1.0, seed=1)


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


def test_the_counts_are_those_of_the_training_text(tmp_path, models):
    config = short(models["txl"], models["txl"].data)
    config = replace(config, eval=replace(config.eval, ngram_cache="training"))
    found = contestant.measured(config, tmp_path / "run", n_tokens=50)
    corpus = contestant.prepare(config.data, lambda _: None)
    model = load_model(tmp_path / "run" / "model" / "best")
    expected = evaluate(
        model,
        corpus.split(found["test"]["split"])[:51],
        WithMemory(
            batch_size=config.eval.batch_size,
            segment_len=config.eval.segment_len or config.train.segment_len,
            mem_len=found["test"]["mem_len"],
            ngram_cache=NGramMixture(SortedContexts(corpus.split("train"))),
        ),
    )
    bits = expected.nll_with_cache / math.log(2)
    assert found["with_counts"]["bits_per_token"] == pytest.approx(bits)


def test_losses_are_of_as_many_tokens_as_asked_for(tmp_path, models):
    config = short(models["txl"], models["txl"].data)
    found = contestant.measured(config, tmp_path, n_tokens=20)
    assert found["valid"]["tokens"] == found["test"]["tokens"] == 20


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


def test_flops_with_random_memory_lengths_are_their_mean(sized):
    def of_token(mem_len, least=None):
        recipe = sized("transformer_xl", mem_len=mem_len)
        recipe = replace(recipe, train=replace(recipe.train, random_mem_len=least))
        return contestant.training_flops(recipe, build_model(recipe.model))[0]

    assert of_token(64, 16) == pytest.approx(sum(map(of_token, (64, 32, 16))) / 3)


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
