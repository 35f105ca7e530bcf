"""What holds for the paper's network holds for every option beside it."""

from dataclasses import replace

import pytest
import torch
from tests.laws.conftest import CONFIG, ENHANCED, VARIANTS

from transformer_xl.inference.evaluate import WithMemory, evaluate
from transformer_xl.model import build_model, load_model
from transformer_xl.model.quantizing import compact

ABSOLUTE = {
    "sinusoids": {"attn_type": 2, "qk_norm": True, "activation": "swiglu"},
    "learned positions": VARIANTS["modern"] | {"attn_type": 3, "n_positions": 9},
}
ADAPTIVE = {
    "clusters": {"cutoffs": (8, 20), "div_val": 2, "d_embed": 8},
    "one table in clusters": {"cutoffs": (8, 20)},
}
ALL = VARIANTS | ENHANCED | ABSOLUTE | ADAPTIVE


def some_text(B=2, length=12):
    return torch.randint(CONFIG.vocab_size, (B, length))


def test_gradients_are_those_of_the_loss(attending):
    model, text = attending, some_text(2, 17)
    with torch.no_grad():
        _, mems = model.read(text[:, :8], None)
    parameters = [*model.parameters()]
    directions = [torch.randn_like(x) for x in parameters]

    @torch.no_grad()
    def moved(step):
        for x, d in zip(parameters, directions, strict=True):
            x.add_(d, alpha=step)
        return model(text[:, 8:-1], mems, text[:, 9:]).loss

    model(text[:, 8:-1], mems, text[:, 9:]).loss.backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in parameters)
    slope = sum((x.grad * d).sum() for x, d in zip(parameters, directions, strict=True))
    eps = 1e-6
    expected = (moved(eps) - moved(-2 * eps)) / (2 * eps)
    torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ALL)
def test_it_is_stored_and_made_compact_and_trained_in_half_precision(name, tmp_path):
    config = replace(CONFIG, init_std=0.2, proj_init_std=0.01, **ALL[name])
    model, text = build_model(config).eval(), some_text(1, 80)
    model.save_pretrained(tmp_path)
    found = load_model(tmp_path)
    assert found.config == model.config
    one, other = found(text[:, :9]), model(text[:, :9])
    assert torch.equal(one.log_probs, other.log_probs)
    for state, expected in zip(one.mems.states, other.mems.states, strict=True):
        assert torch.equal(state, expected)

    exact = evaluate(model, text[0], WithMemory(segment_len=16)).nll
    for weights in ("bfloat16", "int8") if model.config.kind == "transformer_xl" else ():
        nll = evaluate(compact(model, weights), text[0], WithMemory(segment_len=16)).nll
        assert nll == pytest.approx(exact, rel=0.02), weights
        assert nll != exact

    model = build_model(replace(config, dropout=0.2)).train()
    text, mems = some_text(2, 13), None
    with torch.autocast("cpu", torch.bfloat16):
        for start in (0, 6):
            out = model(text[:, start : start + 6], mems, text[:, start + 1 : start + 7])
            mems = out.mems
            out.loss.backward()
    assert all(x.grad.isfinite().all() for x in model.parameters())
    assert out.loss.isfinite()
