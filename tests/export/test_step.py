"""A step is the model, with a memory of a fixed shape."""

import pytest
import torch

from transformer_xl.interop.export import Step
from transformer_xl.model import build_model

OPTIONS = {
    "paper": {},
    "clamped": {"clamp_len": 3},
    "windowed": {"attn_len": 4},
    "zeros": {"start_memory": "zeros"},
    "learned distances": {"attn_type": 1, "n_positions": 6},
    "pre-norm": {"norm_first": True, "final_norm": True, "tie_biases": False},
    "rms": {"norm": "rms", "qk_norm": True, "activation": "swiglu"},
    "rms, zeros": {"norm": "rms", "norm_first": True, "start_memory": "zeros"},
    "key offset, scalable softmax": {"key_offset": True, "scalable_softmax": 3},
    "lengths by layer": {"layer_attn_lens": (2, 5), "key_offset": True},
    "enhanced": {"enhanced_recurrence": True, "norm_first": True},
    "adaptive": {"cutoffs": (8, 20), "div_val": 2, "d_embed": 8},
    "clusters": {"cutoffs": (8, 20), "tie_embeddings": False},
    "narrow": {"d_embed": 8, "tie_projections": True},
    "overlapping": {"ext_len": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_say_what_the_model_says(made, steps_alike, name):
    model = made(**OPTIONS[name])
    for n_tokens, streams in ((1, 3), (3, 1), (8, 3), (8, 1)):
        step = Step(model, n_tokens=n_tokens)
        assert steps_alike(model, step, step, streams=streams) < 1e-5, f"{n_tokens} {streams}"


def test_the_memory_may_have_another_length(made, steps_alike):
    model = made()
    for mem_len in (1, 12):
        step = Step(model, mem_len=mem_len)
        assert steps_alike(model, step, step) < 1e-5
        assert step.start(2)[0].shape == (2, 2, 2, mem_len, 8)


@torch.no_grad()
def test_what_is_not_seen_may_be_anything(made):
    step = Step(made())
    tokens = torch.tensor([[3], [4]])
    keys, values, _ = step.start(2)
    seen = torch.tensor([2, 0])
    found = step(tokens, keys.clone(), values.clone(), seen)[0]
    keys[:, :, 0, :3], values[:, :, 0, :3] = 7.0, -9.0
    keys[:, :, 1], values[:, :, 1] = 7.0, -9.0
    torch.testing.assert_close(step(tokens, keys, values, seen)[0], found)
    keys[:, :, 0, 3:] = 7.0
    assert not torch.allclose(step(tokens, keys, values, seen)[0][0], found[0])


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"mem_len": 0}, {}, "mem_len=0: a step has a memory of at least 1"),
        ({}, {"mem_len": -1}, "mem_len=-1"),
        ({}, {"n_tokens": 0}, "n_tokens=0 must be at least 1"),
        (
            {"start_memory": "zeros", "norm_first": True},
            {},
            "with start_memory='zeros', norm_first=True, norm='layer' cannot be exported: a step "
            "needs no zeros before a text, whose keys are not zeros$",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_exported_is_named(made, options, settings, message):
    with pytest.raises(ValueError, match=message):
        Step(made(**options), **settings)


def test_a_model_of_another_kind_or_precision_is_named(made, of_kind):
    config = made().config
    with pytest.raises(ValueError, match=r"with weights in torch\.bfloat16 cannot be exported"):
        Step(made().bfloat16())
    for model, found in (
        (build_model(of_kind(config, "lstm", mem_len=0)), "kind='lstm'"),
        (made(attn_type=2), "attn_type=2"),
        (made(reset_at=7), "reset_at=7"),
        (made(attn_type=2, reset_at=7), "attn_type=2, reset_at=7"),
    ):
        with pytest.raises(ValueError, match=f"^a model with {found} cannot be exported: a step"):
            Step(model)
