"""Dynamic evaluation scores first, learns then, and touches nobody else's weights."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from transformer_xl.config import EvalConfig
from transformer_xl.inference.evaluate import (
    Dynamic,
    Passage,
    WithMemory,
    evaluate,
    gradient_squares,
    plan_dynamic,
)
from transformer_xl.model import TransformerXL, build_model
from transformer_xl.model.quantizing import compact

LENGTHS = {"segment_len": 7, "mem_len": 9}


@pytest.fixture
def squares(model):
    training_text = np.random.default_rng(1).integers(0, 31, 43)
    return gradient_squares(model, training_text, **LENGTHS)


@pytest.fixture(params=["sgd", "rms"])
def settings(request):
    if request.param == "sgd":
        return Dynamic(rule="sgd", lr=0.1, decay=0.1, **LENGTHS)
    squares = request.getfixturevalue("squares")
    return Dynamic(rule="rms", lr=0.01, decay=0.1, squares=squares, **LENGTHS)


def losses(model, text, how):
    """Return the losses of all tokens but the first."""
    passage, lengths = Passage.of(text, model.config), how.lengths(model.config)
    with torch.no_grad():
        return torch.cat([nll[0] for nll, _ in how.losses(model, passage, lengths)])


@pytest.mark.parametrize("kind", ["transformer_xl", "lstm"])
def test_without_a_learning_rate_it_is_the_plain_evaluation(tiny_config, of_kind, text, kind):
    config = of_kind(tiny_config, kind, init_std=0.3, mem_len=9 * (kind != "lstm"))
    model = build_model(config).double().eval()
    plain = evaluate(model, text, WithMemory(**LENGTHS)).nll
    still = evaluate(model, text, Dynamic(rule="sgd", lr=0.0, decay=0.5, **LENGTHS)).nll
    assert still == pytest.approx(plain, rel=1e-12)
    moving = evaluate(model, text, Dynamic(rule="sgd", lr=0.1, **LENGTHS)).nll
    assert abs(moving - plain) > 1e-3


def test_the_callers_model_stays_as_it_is(model, text, settings):
    model.layers[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    evaluate(model.train(), text, settings)
    gradient_squares(model, text, **LENGTHS)
    assert model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None for x in model.parameters())
    assert not next(model.layers[0].parameters()).requires_grad
    assert torch.is_grad_enabled()


def test_a_token_is_scored_before_anything_is_learned_from_it(model, text, settings):
    """What comes later, in the segment or behind it, changes no score before it."""
    whole = losses(model, text[:40], settings)
    for place in (10, 14, 15, 30):
        changed = text[:40].copy()
        changed[place] = (changed[place] + 1) % 31
        other = losses(model, changed, settings)
        # A score stands at the place before its token.
        assert torch.equal(other[: place - 1], whole[: place - 1])
        assert not torch.equal(other[place - 1 :], whole[place - 1 :])


def test_the_steps_are_those_of_the_paper(model, text, settings, squares):
    """By hand: steps down the gradient and towards the trained weights, after each segment."""
    trained = {name: x.detach().clone() for name, x in model.named_parameters()}
    learner, mems, expected = copy.deepcopy(model), None, []
    weights = dict(learner.named_parameters())
    mean = torch.cat([x.sqrt().flatten() for x in squares.values()]).double().mean().item()
    for start in (0, 7, 14, 21):
        tokens = torch.from_numpy(text[None, start : start + 8])
        out = learner(tokens[:, :-1], mems, tokens[:, 1:], mem_len=9)
        mems = out.mems
        expected.append(out.nll.detach()[0])
        gradients = torch.autograd.grad(out.loss, [*weights.values()])
        with torch.no_grad():
            for (name, x), g in zip(weights.items(), gradients, strict=True):
                size, back = torch.ones(()), 0.1
                if settings.rule == "rms":
                    size = squares[name].sqrt() + settings.eps * mean
                    back = (0.1 * squares[name].sqrt() / mean).clamp(max=1)
                x += -settings.lr * g / size + back * (trained[name] - x)
    found = losses(model, text[:29], settings)
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_the_cache_of_autocast_does_not_bring_back_old_weights(model, text, settings):
    with torch.autocast("cpu", torch.bfloat16):
        cached = losses(model, text, settings)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert torch.equal(losses(model, text, settings), cached)


def test_an_evaluation_says_how_it_learned(model, text, squares):
    settings = Dynamic(lr=0.01, decay=0.1, eps=0.2, squares=squares, **LENGTHS)
    result = evaluate(model, text, settings)
    expected = losses(model, text, settings).double().mean().item()
    assert result.nll == pytest.approx(expected, rel=1e-6)
    assert (result.tokens, result.batch_size, result.mem_len) == (59, 1, 9)
    assert (result.dynamic, result.dynamic_lr, result.dynamic_decay, result.dynamic_eps) == (
        *("rms", 0.01, 0.1, 0.2),
    )
    assert evaluate(model, text).dynamic is None


def test_settings_become_a_plan(model, text):
    def never():
        raise AssertionError("only rms needs the training text")

    assert plan_dynamic(EvalConfig(), model, never, segment_len=7) is None
    config = EvalConfig(dynamic="sgd", dynamic_lr=0.5, dynamic_decay=0.25)
    plan = plan_dynamic(config, model, never, segment_len=7)
    assert plan == Dynamic(rule="sgd", lr=0.5, decay=0.25, segment_len=7)
    config = EvalConfig(dynamic="rms", dynamic_tokens=30, mem_len=3)
    plan = plan_dynamic(config, model, lambda: text, segment_len=7)
    assert plan is not None
    assert plan.squares is not None
    expected = gradient_squares(model, text[:30], segment_len=7, mem_len=3)
    assert all(torch.equal(plan.squares[name], x) for name, x in expected.items())
    assert (plan.segment_len, plan.mem_len) == (7, 3)


@pytest.fixture
def completing(tiny_config):
    """A model that counts what follows token 1, in documents that begin with token 0."""
    config = replace(tiny_config, init_std=0.3, reset_at=0, completion_at=1)
    return TransformerXL(config).eval()


# A completion at the end of the second of three segments, which goes on in the third.
TABLE = np.array([0, 5, 6, 7, 8, 9, 5, 6, 7, 8, 5, 1, 9, 8, 7, 0, 5, 6, 7, 8, 9, 5])


def completion_loss(model, mems, start, *, counts_all=False):
    """Return the mean loss of the completions in a segment of TABLE, and the memory after it."""
    tokens = torch.from_numpy(TABLE[None, start : start + 8])
    out = model(tokens[:, :-1], mems, tokens[:, 1:], mem_len=9)
    places = [x - start - 1 for x in range(12, 16) if start < x <= start + 7]
    return (out.nll.mean() if counts_all else out.nll[0, places].mean()), out.mems


def test_only_completions_are_learned_from(completing):
    trained = copy.deepcopy(dict(completing.named_parameters()))
    learner, mems, expected = copy.deepcopy(completing), None, []
    for start in (0, 7, 14):
        with torch.no_grad():
            tokens = torch.from_numpy(TABLE[None, start : start + 8])
            expected += [learner(tokens[:, :-1], mems, tokens[:, 1:], mem_len=9).nll[0]]
        loss, mems = completion_loss(learner, mems, start)
        if not start:
            # A segment of a prompt makes no step, nor one towards the trained weights.
            continue
        loss.backward()
        with torch.no_grad():
            for name, x in learner.named_parameters():
                x += -0.1 * x.grad + 0.1 * (trained[name] - x)
        learner.zero_grad()
    found = losses(completing, TABLE, Dynamic(rule="sgd", lr=0.1, decay=0.1, **LENGTHS))
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_completions", [False, True])
def test_squares_are_means_over_segments(tiny_config, completing, has_completions):
    model, starts = completing, (7, 14)
    if not has_completions:
        # All tokens count, in each segment.
        config = replace(tiny_config, init_std=0.3, reset_at=0)
        model, starts = TransformerXL(config).eval(), (0, 7, 14)
    found = gradient_squares(model, TABLE, **LENGTHS)
    weights, mems = dict(model.named_parameters()), None
    sums = dict.fromkeys(weights, 0.0)
    for start in (0, 7, 14):
        loss, mems = completion_loss(model, mems, start, counts_all=not has_completions)
        if start in starts:
            gradients = torch.autograd.grad(loss, [*weights.values()])
            pairs = zip(weights, gradients, strict=True)
            sums = {name: sums[name] + g**2 / len(starts) for name, g in pairs}
    for name, mean in sums.items():
        torch.testing.assert_close(found[name], mean)
    if has_completions:
        with pytest.raises(ValueError, match="has no completion: the token completion_at=1"):
            gradient_squares(model, TABLE[:11], **LENGTHS)


def test_a_rule_without_what_it_needs_or_out_of_range_is_named():
    for wrong, message in (
        ({"lr": -1.0}, "lr=-1.0 must be at least 0"),
        ({"lr": float("nan")}, "lr=nan must be a finite number"),
        ({"lr": 0.1, "decay": 1.5}, "decay=1.5 must be at most 1"),
        ({"lr": 0.1, "eps": 0.0}, "eps=0.0 must be above 0"),
        ({"lr": 0.1, "rule": "rms"}, "rule='rms' needs the squares of gradients"),
    ):
        with pytest.raises(ValueError, match=message):
            Dynamic(**{"rule": "sgd", **wrong})


def test_what_cannot_learn_or_does_not_fit_is_an_error(model, tiny_config, text, squares):
    settings = Dynamic(rule="sgd", lr=0.1)
    with pytest.raises(ValueError, match="a compact model cannot learn: use the model"):
        evaluate(compact(model, "bfloat16"), text, settings)
    other = TransformerXL(replace(tiny_config, d_inner=8))
    with pytest.raises(ValueError, match="those of a model with other weights"):
        evaluate(other, text, Dynamic(lr=0.1, squares=squares))
    with pytest.raises(ValueError, match="7 tokens of training text are less than a segment of 7"):
        gradient_squares(model, text[:7], **LENGTHS)
