"""What holds for the paper's network holds for every option beside it."""

from dataclasses import replace

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.inference.evaluate import evaluate
from transformer_xl.inference.generate import generate
from transformer_xl.model import TransformerXL
from transformer_xl.model.compact import compact
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.stepper import Stepper

EXACT = {"rtol": 0, "atol": 1e-12}
V = 23
CONFIG = ModelConfig(
    vocab_size=V, n_layer=3, n_head=2, d_model=12, d_inner=20, mem_len=6, dropout=0.0, init_std=0.4
)
MODERN = {
    "norm_first": True,
    "final_norm": True,
    "norm": "rms",
    "activation": "relu_squared",
    "qk_norm": True,
}
OPTIONS = {
    "paper": {},
    "RMS norm": {"norm": "rms"},
    "RMS norm first": {"norm": "rms", "norm_first": True, "final_norm": True},
    "squared ReLU": {"activation": "relu_squared"},
    "GELU": {"activation": "gelu"},
    "GEGLU": {"activation": "geglu"},
    "SwiGLU": {"activation": "swiglu"},
    "normalized queries and keys": {"qk_norm": True},
    "normalized, learned distances": {"qk_norm": True, "attn_type": 1, "n_positions": 9},
    "normalized, raw queries": {"qk_norm": True, "norm_first": True, "quirks": ("raw_queries",)},
    "modern": MODERN,
    "gates": {"norm_first": True, "gate": "gru"},
    "gates, learned distances": {
        "norm_first": True,
        "gate": "gru",
        "attn_type": 1,
        "n_positions": 9,
    },
}
RECURRENT = {
    "enhanced": {"enhanced_recurrence": True},
    "enhanced, learned distances": {
        "enhanced_recurrence": True,
        "attn_type": 1,
        "n_positions": 9,
    },
    "enhanced, with zeros": {"enhanced_recurrence": True, "start_memory": "zeros"},
    "enhanced, limited": {"enhanced_recurrence": True, "attn_len": 4, "clamp_len": 3},
    "enhanced, modern": MODERN | {"enhanced_recurrence": True},
}
ALL = OPTIONS | RECURRENT
ABSOLUTE = {
    "sinusoids": {"attn_type": 2, "qk_norm": True, "activation": "swiglu"},
    "learned positions": MODERN | {"attn_type": 3, "n_positions": 9},
}


@torch.no_grad()
def made(settings):
    model = TransformerXL(replace(CONFIG, **settings)).double().eval()
    for parameter in model.parameters():
        # Biases too: what begins as zero hides mistakes.
        parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(params=ALL)
def model(request):
    return made(ALL[request.param])


def some_text(B=2, length=12):
    return torch.randint(V, (B, length))


def read(model, text, T, mems, **lengths):
    """Read a text in segments of T; return its hidden states and the memory."""
    parts = []
    for segment in text.split(T, 1):
        hidden, mems = model.read(segment, mems, **lengths)
        parts.append(hidden)
    return torch.cat(parts, 1), mems


@pytest.mark.parametrize("lengths", [{}, {"mem_len": 0}], ids=str)
@torch.no_grad()
def test_kept_keys_give_the_numbers_of_the_hidden_states(model, lengths):
    mems = model.start_memory(3)
    kept = model.keep(mems)
    for step, T in enumerate([3, 1, 5, 2, 9, 1, 1, 4]):
        segment = some_text(3, T)
        expected, out = model(segment, mems, **lengths), model(segment, kept, **lengths)
        torch.testing.assert_close(out.hidden, expected.hidden, **EXACT)
        mems, kept = expected.mems, out.mems
        again = model.keep(mems).state_dict()
        for name in ("keys", "values"):
            torch.testing.assert_close(kept.state_dict()[name], again[name], **EXACT)
        if step % 3 == 2:
            mems, kept = mems.reset([step % 3]), kept.reset([step % 3])


@pytest.mark.parametrize("prompt", [0, 4, 11])
@torch.no_grad()
def test_a_ring_gives_the_numbers_of_a_memory(model, prompt):
    mems = model.keep(model.start_memory(2))
    if prompt:
        _, mems = model.read(some_text(2, prompt), mems)
    text = some_text(2, 17)
    expected, after = read(model, text, 1, mems)
    stepper = Stepper.of(model, Lengths.of(model.config), mems)
    found = torch.stack([stepper(token) for token in text.T], 1)
    torch.testing.assert_close(found, expected, **EXACT)
    for name in ("keys", "values"):
        one, other = stepper.memory().state_dict()[name], after.state_dict()[name]
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("T", [1, 5])
@torch.no_grad()
def test_segments_are_invisible(name, T):
    model, text = made(OPTIONS[name]), some_text()
    whole, _ = read(model, text, 12, None, mem_len=20)
    parts, _ = read(model, text, T, None, mem_len=20)
    torch.testing.assert_close(parts, whole, **EXACT)


@pytest.mark.parametrize("name", RECURRENT)
@torch.no_grad()
def test_enhanced_recurrence_shows_where_segments_begin(name):
    text, lengths = some_text(), {"mem_len": 20, "attn_len": None}
    model = made(RECURRENT[name] | {"start_memory": "empty"})
    whole, _ = read(model, text, 12, None, **lengths)
    parts, _ = read(model, text, 4, None, **lengths)
    torch.testing.assert_close(parts[:, :4], whole[:, :4], **EXACT)
    assert (parts - whole)[:, 4:].abs().max() > 1e-3


@pytest.mark.parametrize("name", RECURRENT)
@torch.no_grad()
def test_enhanced_recurrence_remembers_what_each_layer_put_out(name):
    model = made(RECURRENT[name])
    put_out = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, given, out: put_out.append(out[0]))
    _, mems = model.read(some_text(2, 6), None)
    for state, expected in zip(mems.states, put_out, strict=True):
        torch.testing.assert_close(state, expected, **EXACT)
    # One layer up it is the cache of the ordinary recurrence.
    other = TransformerXL(replace(model.config, enhanced_recurrence=False)).double().eval()
    other.load_state_dict(model.state_dict())
    read_by = []
    for layer in other.layers:
        layer.register_forward_pre_hook(lambda _, given: read_by.append(given[0]))
    text = some_text(2, 6)
    torch.testing.assert_close(other.read(text)[0], model.read(text)[0], **EXACT)
    for below, above in zip(put_out[len(model.layers) : -1], read_by[1:], strict=True):
        torch.testing.assert_close(below, above, **EXACT)


@pytest.mark.parametrize("is_enhanced", [False, True])
@torch.no_grad()
def test_enhanced_recurrence_reaches_back_without_limit(is_enhanced):
    model = made({"enhanced_recurrence": is_enhanced})
    text = some_text(1, 80)
    other = text.clone()
    other[0, 0] = (text[0, 0] + 1) % V
    # Memory and segment of two tokens in three layers are the reach of the ordinary recurrence.
    one, two = (read(model, x, 2, None, mem_len=2)[0] for x in (text, other))
    has_changed = (one != two).any(-1)[0]
    assert has_changed[: 3 * 2].all()
    assert has_changed[3 * 3 :].any() == is_enhanced


def test_gradients_are_those_of_the_loss(model):
    text = some_text(2, 17)
    _, mems = model.read(text[:, :8], None)
    mems = mems.detach()
    parameters = list(model.parameters())
    directions = [torch.randn_like(x) for x in parameters]

    def loss(step):
        with torch.no_grad():
            for x, d in zip(parameters, directions, strict=True):
                x.add_(d, alpha=step)
        value = model(text[:, 8:-1], mems, text[:, 9:]).loss
        with torch.no_grad():
            for x, d in zip(parameters, directions, strict=True):
                x.sub_(d, alpha=step)
        return value

    model.zero_grad()
    model(text[:, 8:-1], mems, text[:, 9:]).loss.backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in parameters)
    slope = sum((x.grad * d).sum() for x, d in zip(parameters, directions, strict=True))
    eps = 1e-6
    expected = (loss(eps) - loss(-eps)) / (2 * eps)
    torch.testing.assert_close(slope, expected.detach(), rtol=1e-5, atol=1e-8)


def test_no_gradient_enters_the_memory(model):
    mems = model.start_memory(2, mem_len=6)
    _, mems = model.read(some_text(2, 6), mems)
    assert not any(state.requires_grad for state in mems.states)
    states = [state.detach().requires_grad_() for state in mems.states]
    model(some_text(2, 4), type(mems)(states)).log_probs.sum().backward()
    assert all(state.grad is None for state in states)


@pytest.mark.parametrize("name", [*ALL, *ABSOLUTE])
def test_a_folder_holds_the_whole_model(name, tmp_path):
    model = TransformerXL(replace(CONFIG, **(ALL | ABSOLUTE)[name])).eval()
    model.save_pretrained(tmp_path)
    found, text = TransformerXL.from_pretrained(tmp_path), some_text()
    assert found.config == model.config
    for one, other in zip(found(text).mems.states, model(text).mems.states, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(found(text).log_probs, model(text).log_probs)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", [*ALL, *ABSOLUTE])
def test_a_compact_model_predicts_nearly_the_same(name, weights):
    settings = {"init_std": 0.2} | (ALL | ABSOLUTE)[name]
    model, text = TransformerXL(replace(CONFIG, **settings)).eval(), torch.randint(V, (200,))
    exact = evaluate(model, text, segment_len=16).nll
    found = evaluate(compact(model, weights), text, segment_len=16).nll
    assert found == pytest.approx(exact, rel=0.02)
    assert found != exact


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_writing_is_reading_everything_anew(name):
    model, text = made(OPTIONS[name]), [3, 1, 4, 1, 5]
    found = list(generate(model, text, length=10, mem_len=100, temperature=0))
    for token in found:
        assert token == int(model(torch.tensor([text]), mem_len=0).log_probs[0, -1].argmax())
        text = [*text, token]


@pytest.mark.parametrize("name", RECURRENT)
@torch.no_grad()
def test_with_enhanced_recurrence_writing_is_reading_token_by_token(name):
    model = made(RECURRENT[name])
    _, mems = model.read(torch.tensor([[3, 1, 4]]))
    found = list(generate(model, [5], length=15, mems=mems, temperature=0))
    token, expected = 5, []
    for _ in range(15):
        out = model(torch.tensor([[token]]), mems)
        mems, token = out.mems, int(out.log_probs[0, -1].argmax())
        expected.append(token)
    assert found == expected


def test_the_constants_of_normalization_are_the_configured():
    model = TransformerXL(replace(CONFIG, norm="rms", qk_norm=True, final_norm=True, norm_eps=0.5))
    layer = model.layers[0]
    norms = layer.attention_norm, layer.feed_forward_norm, model.final_norm
    assert {x.eps for x in (*norms, layer.attention.q_norm, layer.attention.k_norm)} == {0.5}


@pytest.mark.parametrize("name", ALL)
def test_training_in_half_precision_works(name):
    model = TransformerXL(replace(CONFIG, **ALL[name], dropout=0.2)).train()
    text, mems = some_text(2, 13), None
    with torch.autocast("cpu", torch.bfloat16):
        for start in (0, 6):
            out = model(text[:, start : start + 6], mems, text[:, start + 1 : start + 7])
            mems = out.mems
            out.loss.backward()
    assert all(x.grad.isfinite().all() for x in model.parameters())
    assert out.loss.isfinite()


def test_gated_layers_of_two_thirds_of_the_width_have_as_many_weights():
    def n_weights(**settings):
        model = TransformerXL(replace(CONFIG, **settings))
        return sum(
            x.numel()
            for layer in model.layers
            for x in (layer.feed_forward.inner.weight, layer.feed_forward.outer.weight)
        )

    assert n_weights(d_inner=20, activation="swiglu") == n_weights(d_inner=30)
