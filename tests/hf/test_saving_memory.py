"""Activation checkpointing: the same numbers with less memory."""

from typing import Any

import pytest
import torch

KINDS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "dropout": {"dropout": 0.3, "attn_dropout": 0.2},
    "embedding residuals": {"embedding_residual": True},
    "input recurrence": {"input_recurrence": True},
    "GPT": {"kind": "gpt"},
}
IDS = torch.arange(2 * 12).view(2, 12) % 7


def _enable(model, **settings):
    """Recompute activations, under the name that the installed transformers has for it."""
    older = "gradient_checkpointing_enable"
    getattr(model, "activation_checkpointing_enable", getattr(model, older))(**settings)


def _gradients(model, **given):
    model.zero_grad()
    torch.manual_seed(5)
    out = model(IDS, labels=IDS, **given)
    out.loss.backward()
    return [out.loss.detach(), *(x.grad.clone() for x in model.parameters())]


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_activations_give_the_same_gradients(transformers, any_folder, kind):
    _, folder = any_folder(**KINDS[kind])
    # Three segments: the memory between them has no gradient, either way.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, segment_len=5).train()
    expected = _gradients(model)
    cache = model(IDS).past_key_values
    after = _gradients(model, past_key_values=cache)
    calls = []
    layers = model.transformer.layers
    hooks = [layer.register_forward_pre_hook(lambda *_: calls.append(1)) for layer in layers]
    has_every = hasattr(model, "activation_checkpointing_enable")
    for every, times in ((1, 4), (2, 3)) if has_every else ((1, 4),):
        calls.clear()
        _enable(model, **({"every_n_layers": every} if every > 1 else {}))
        assert model.gradient_checkpointing
        torch.testing.assert_close(_gradients(model), expected)
        # Two layers, three segments; each is computed again in the backward pass.
        assert len(calls) == times * 3
    torch.testing.assert_close(_gradients(model, past_key_values=cache), after)
    assert not any(x.requires_grad for x in model(IDS).past_key_values.mems.tensors)
    older = model.gradient_checkpointing_disable
    getattr(model, "activation_checkpointing_disable", older)()
    assert not model.gradient_checkpointing
    calls.clear()
    _gradients(model)
    assert len(calls) == 6
    for hook in hooks:
        hook.remove()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_checkpointing_that_cannot_be_is_refused(transformers, folder, any_folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="use_reentrant=True loses gradients"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.transformer.recompute
    with pytest.raises(ValueError, match=r"under torch\.no_grad"):
        model(IDS, output_attentions=True)
    with torch.no_grad():
        assert len(model(IDS, output_attentions=True).attentions) == 2
    _, other = any_folder(kind="lstm", n_head=8, d_inner=2048)
    lstm = transformers.AutoModelForCausalLM.from_pretrained(other)
    with pytest.raises(ValueError, match=r"kind='lstm' keep .* a smaller segment_len"):
        _enable(lstm)
