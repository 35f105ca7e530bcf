"""Filters and penalties are what they are elsewhere, and every path applies them alike."""

import copy
import math
import random
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
import torch

from transformer_xl import Session, State
from transformer_xl.config import GenerateConfig, ModelConfig
from transformer_xl.config.checks import read_settings
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.inference.generate import (
    History,
    Sampler,
    Sampling,
    TextWriter,
    generate,
    generate_batch,
)
from transformer_xl.inference.generate.sampler import extended
from transformer_xl.model import AdaptiveSoftmax, Embedding, Softmax, TransformerXL

V, ROWS = 40, 6
BYTES = train_vocab("bytes", [])
PENALTIES = {"repetition_penalty": 1.3, "dry_multiplier": 0.8}
EACH = [
    {"min_p": 0.2},
    {"repetition_penalty": 1.5},
    {"dry_multiplier": 1.5, "dry_allowed_length": 1},
    {**PENALTIES, "temperature": 0},
    {**PENALTIES, "temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
]


@pytest.fixture
def logits():
    return 3 * torch.randn(ROWS, V)


@torch.no_grad()
def softmax_of(logits):
    """A softmax with these logits, for the hidden states of an identity matrix."""
    config = ModelConfig(vocab_size=V, d_model=ROWS, n_head=1)
    softmax = Softmax(config, Embedding(config))
    softmax.weight.copy_(logits.T)
    softmax.bias.zero_()
    return softmax


@torch.no_grad()
def probabilities(sampler, softmax, histories=()):
    hidden = torch.eye(ROWS)
    values = softmax.log_probs(hidden)
    if sampler.needs_history:
        values = sampler._penalized(softmax, hidden, histories)
    weights, tokens = sampler._weights(values)
    probs = weights / weights.sum(-1, keepdim=True)
    return probs if tokens is None else torch.zeros(ROWS, V).scatter(1, tokens, probs)


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"top_k": 9}, {"top_k": 99}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.7},
        {"min_p": 0.1}, {"min_p": 1.0}, {"repetition_penalty": 1.4}, {"repetition_penalty": 0.7},
        {"top_k": 9, "min_p": 0.1}, {"top_p": 0.8, "min_p": 0.2},
        {"top_k": 9, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2},
    ],
    ids=str,
)  # fmt: skip
def test_filters_and_repetition_penalty_are_those_of_transformers(logits, settings):
    from transformers.generation import logits_process as theirs

    ids = torch.randint(V, (ROWS, 25))
    kinds = {
        "repetition_penalty": theirs.RepetitionPenaltyLogitsProcessor,
        "temperature": theirs.TemperatureLogitsWarper,
        "top_k": theirs.TopKLogitsWarper,
        "top_p": theirs.TopPLogitsWarper,
        "min_p": theirs.MinPLogitsWarper,
    }
    for temperature in (1.0, 0.6, 1.7):
        settings = {**settings, "temperature": temperature}
        own = [kind(settings[name]) for name, kind in kinds.items() if name in settings]
        expected = theirs.LogitsProcessorList(own)(ids, logits).softmax(-1)
        histories = [History(row) for row in ids.tolist()]
        found = probabilities(Sampler(Sampling(**settings)), softmax_of(logits), histories)
        assert torch.equal(found > 0, expected > 0), temperature
        torch.testing.assert_close(found, expected)


def test_tokens_before_the_window_are_not_penalized(logits):
    sampler = Sampler(Sampling(repetition_penalty=1.5, dry_multiplier=1))
    window = [1, 2] * 512
    softmax = softmax_of(logits)
    found, expected = (
        probabilities(sampler, softmax, [History(tokens)] * ROWS)
        for tokens in ([7, 8, 9, *window], window)
    )
    assert torch.equal(found, expected)


@torch.no_grad()
def test_the_repetition_penalty_multiplies_log_probabilities_where_there_are_no_logits():
    config = ModelConfig(vocab_size=V, d_model=ROWS, n_head=1, cutoffs=(5, 20))
    softmax = AdaptiveSoftmax(config, Embedding(config))
    for weight in softmax.parameters():
        weight.normal_()
    expected = softmax.log_probs(torch.eye(ROWS))
    expected[:, [3, 30]] *= 1.5
    found = probabilities(
        Sampler(Sampling(repetition_penalty=1.5)),
        softmax,
        [History([3, 30, 3]) for _ in range(ROWS)],
    )
    torch.testing.assert_close(found, expected.softmax(-1))


def plain_dry(tokens, allowed):
    """Lengths by the definition: every earlier place, compared token by token."""
    found = {}
    for end in range(len(tokens) - 1):
        n = 0
        while n <= end and tokens[end - n] == tokens[-1 - n]:
            n += 1
        follower = tokens[end + 1]
        n = min(n, allowed + 48)
        if n >= allowed:
            found[follower] = max(n, found.get(follower, 0))
    return found


@pytest.mark.parametrize("n_symbols", [1, 2, 3, 8])
def test_dry_finds_what_its_definition_finds(n_symbols):
    draw = random.Random(n_symbols)
    n_found = 0
    for n in [*range(12), 60, 300]:
        for _ in range(12):
            tokens = [draw.randrange(n_symbols) for _ in range(n)]
            if n > 60:
                tokens[-70:] = tokens[40:110]
            allowed = draw.choice((1, 2, 4, 60))
            found = extended(np.array(tokens, np.int32), allowed)
            assert found == plain_dry(tokens, allowed)
            n_found += bool(found)
    assert n_found > 20


def test_dry_subtracts_a_power_of_the_length(logits):
    sampler = Sampler(Sampling(dry_multiplier=0.8, dry_allowed_length=2))
    # 5 would extend a repetition of three tokens, 9 one of two.
    histories = [History([1, 2, 3, 5, 7, 2, 3, 9, 1, 2, 3])] * ROWS
    expected = logits.clone()
    expected[:, 5] -= 0.8 * 1.75
    expected[:, 9] -= 0.8
    found = probabilities(sampler, softmax_of(logits), histories)
    torch.testing.assert_close(found, expected.softmax(-1))


def test_the_largest_penalties_leave_finite_logits(logits):
    sampler = Sampler(Sampling(dry_multiplier=1e39, repetition_penalty=1e20))
    found = probabilities(sampler, softmax_of(logits), [History([1, 2] * 60)] * ROWS)
    assert found.isfinite().all()
    assert not found[:, 1].any()
    even = probabilities(Sampler(Sampling(temperature=math.inf)), softmax_of(logits))
    torch.testing.assert_close(even, torch.full_like(even, 1 / V))
    for temperature, penalty in product((0.5, 1.0), (1e-300, 1e-40, 1e39, 1e300)):
        sampler = Sampler(Sampling(temperature=temperature, repetition_penalty=penalty))
        found = probabilities(sampler, softmax_of(logits), [History([1, 2, 3])] * ROWS)
        assert found.isfinite().all(), penalty
        chosen = found[:, :4].sum(-1)
        assert ((chosen < 0.5) | (chosen == 1)).all(), penalty


def test_a_history_holds_the_last_tokens():
    history, tokens = History([1, 2, 3]), [1, 2, 3]
    for token in range(3 * GenerateConfig.MAX_HISTORY):
        history.append(token % V)
        tokens.append(token % V)
        # What is appended to a copy is not seen here.
        copy.copy(history).append(99)
        if token % 997 == 0 or token % GenerateConfig.MAX_HISTORY < 5:
            assert (
                history.last().tolist()[-GenerateConfig.MAX_HISTORY :]
                == tokens[-GenerateConfig.MAX_HISTORY :]
            )
            assert history.last(7).tolist() == tokens[-7:]


def test_settings_that_are_off_change_nothing(model):
    off = {"repetition_penalty": 1.0, "dry_multiplier": 0.0, "min_p": 0.0, "on_loop": "continue"}
    for settings in ({}, {"top_k": 5}, {"top_p": 0.8, "temperature": 0.7}, {"temperature": 0}):
        one, other = Sampling(**settings), Sampling(**off | settings)
        expected = list(generate(model, [1, 2], one, length=40, seed=3))
        assert list(generate(model, [1, 2], other, length=40, seed=3)) == expected
        assert Sampler(one).settings == Sampler(other).settings


def test_all_settings_of_a_recipe_are_settings_of_the_sampler():
    others = {"prompt", "length", "stop", "seed"}
    names = {field.name for field in fields(GenerateConfig)} - others
    assert {x.name for x in fields(Sampling)} == names | {"config"}
    assert {*Sampler(Sampling()).settings} == {"temperature", "top_k", "top_p"}
    every = {name: getattr(GenerateConfig(), name) for name in names}
    every |= {"min_p": 0.1, "repetition_penalty": 2.0, "dry_multiplier": 1.0, "on_loop": "break"}
    assert Sampler(Sampling(**every)).settings == every


@pytest.mark.parametrize("settings", EACH, ids=str)
def test_a_batch_draws_what_each_text_draws_alone(tiny_config, settings):
    model = TransformerXL(replace(tiny_config, init_std=0.3)).double().eval()
    prompts = [[1, 2, 3, 1, 2], [4], [5, 6, 7] * 9, [1, 2, 3, 1, 2]]
    steps = list(generate_batch(model, prompts, Sampling(**settings), length=25, seed=3))
    for n, prompt in enumerate(prompts):
        alone = list(generate(model, prompt, Sampling(**settings), length=25, seed=3 + n))
        assert [step[n] for step in steps] == alone
    # The settings count.
    plain = {name: x for name, x in settings.items() if name in ("temperature", "top_k")}
    assert alone != list(generate(model, prompt, Sampling(**plain), length=25, seed=3 + n))


@pytest.mark.parametrize("settings", EACH, ids=str)
def test_a_text_goes_on_with_its_history_as_if_it_had_not_stopped(model, settings, tmp_path):
    model.save_pretrained(tmp_path)
    sampling = Sampling(**settings)
    whole = list(generate(model, [7, 2, 3], sampling, length=30, seed=3))
    first = generate(model, [7, 2, 3], sampling, length=18, seed=3)
    begun = list(first)
    rest = generate(model, (), sampling, length=12, state=first.state)
    assert begun + list(rest) == whole

    first.state.save(tmp_path / "state", tmp_path / "model.safetensors")
    state = State.load(tmp_path / "state", tmp_path / "model.safetensors", model)
    assert begun + list(generate(model, (), sampling, length=12, state=state)) == whole


@pytest.mark.parametrize("settings", EACH, ids=str)
def test_a_session_writes_what_generate_writes_however_it_is_cut(tiny_config, tmp_path, settings):
    model = TransformerXL(replace(tiny_config, vocab_size=256, init_std=0.3)).eval()
    model.save_pretrained(tmp_path, BYTES)
    text = b"one two three one two"
    session = Session.open(tmp_path, seed=3)
    session.write(text.decode())
    start, sampling = session.state, Sampling(**settings)
    whole = [*generate(model, text, sampling, length=30, seed=3)]
    pieces = TextWriter(BYTES).pieces(whole, goes_on=True)
    assert [*session.generate(30, Sampling(**settings))] == [*pieces]
    session.state = start
    begun = [*session._drawn(10, _sampler(settings), None)]
    begun += session._drawn(10, _sampler(settings), None)
    session.save(tmp_path / "state")
    again = Session.load(tmp_path, tmp_path / "state")
    fork = session.fork()
    for other in (again, fork, session):
        assert [*begun, *other._drawn(10, _sampler(settings), None)] == whole


def _sampler(settings):
    return Sampler(Sampling(**settings))


WRONG = [
    ({"temperature": -1.0}, "^temperature=-1.0 must be"),
    ({"top_k": 0}, "^top_k=0 must be above 0"),
    ({"loop_min_length": 40}, "^loop_min_length=40 has no effect with on_loop='continue'"),
    ({"dry_allowed_length": 3}, "^dry_allowed_length=3 has no effect with dry_multiplier=0"),
]


def test_a_setting_that_cannot_be_is_named():
    for settings, message in WRONG:
        with pytest.raises(ValueError, match=message):
            Sampler(Sampling(**settings), V)


def test_settings_are_values_with_names():
    sampling = Sampling(temperature=2, dry_multiplier=1)
    other = Sampling(temperature=2.0, dry_multiplier=1.0)
    assert hash(sampling) == hash(other)
    assert sampling == other != Sampling(temperature=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperatur'"):
        Sampling(temperatur=1)


def test_a_setting_that_replaces_another_resets_what_it_makes_ineffective():
    config = GenerateConfig(dry_multiplier=0.8, dry_allowed_length=3)
    assert config.changed(dry_multiplier=0.0) == GenerateConfig()
    assert config.changed(min_p=0.1).dry_allowed_length == 3
    with pytest.raises(ValueError, match=r"dry_allowed_length=4 has no effect with dry_multiplier"):
        config.changed(dry_multiplier=0.0, dry_allowed_length=4)


def test_settings_of_before_are_read_where_they_changed_nothing():
    off = {"presence_penalty": 0.0, "penalty_window": 1024, "dry_sequence_breakers": []}
    assert read_settings(GenerateConfig, off, "recipe.toml", "generate") == GenerateConfig()
    for wrong in ({"typical_p": 0.9}, {"dry_base": 2.0}, {"loop_max_period": 9}):
        with pytest.raises(ValueError, match=r"recipe.toml: generate\..* is gone: .*; leave"):
            read_settings(GenerateConfig, wrong, "recipe.toml", "generate")
