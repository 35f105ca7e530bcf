"""The recurrence of the inputs; that it holds with any segmentation is among the laws."""

from dataclasses import replace

import pytest
import torch

from transformer_xl.model import TransformerXL
from transformer_xl.model.memory import Memory


@pytest.fixture
def model(tiny_config):
    config = replace(tiny_config, mem_len=6, input_recurrence=True, init_std=0.5)
    return TransformerXL(config).double().eval()


def inputs_of(model, tokens, mems=None, **options):
    """Return the input of the first layer, and the memory."""
    inputs = []
    hook = model.layers[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    out = model(tokens, mems, **options)
    hook.remove()
    return inputs[0], out.mems


def one_by_one(model, tokens, before, starts=None):
    """Return the inputs of the first layer by the definition, token by token."""
    factor, states = model.input_decay.tanh(), []
    for t, e in enumerate(model.embedding(tokens).unbind(1)):
        if starts is not None:
            before = before.masked_fill(starts[:, t, None], 0)
        before = e + factor * before
        states.append(before)
    return torch.stack(states, 1)


@pytest.mark.parametrize("T", [1, 2, 3, 8, 13])
@torch.no_grad()
def test_each_input_adds_the_one_before_times_a_factor(model, T):
    tokens = torch.randint(31, (3, 5 + T))
    first, mems = inputs_of(model, tokens[:, :5])
    torch.testing.assert_close(first, one_by_one(model, tokens[:, :5], torch.zeros(3, 16)))
    found, _ = inputs_of(model, tokens[:, 5:], mems)
    torch.testing.assert_close(found, one_by_one(model, tokens[:, 5:], first[:, -1]))


@torch.no_grad()
def test_nothing_is_added_across_the_beginning_of_a_document(model):
    tokens, starts = torch.randint(31, (3, 12)), torch.zeros(3, 12, dtype=torch.bool)
    starts[0, 4] = starts[0, 5] = starts[1, 0] = starts[2, 11] = True
    first, mems = inputs_of(model, torch.randint(31, (3, 5)))
    found, after = inputs_of(model, tokens, mems, starts=starts)
    torch.testing.assert_close(found, one_by_one(model, tokens, first[:, -1], starts))
    # The stream of a memory that was reset begins anew.
    more, first = torch.randint(31, (3, 4)), found[:, -1].clone()
    first[1] = 0
    found, _ = inputs_of(model, more, after.reset([1]))
    torch.testing.assert_close(found, one_by_one(model, more, first))


@torch.no_grad()
def test_rows_shorter_than_others_go_on_from_their_last_token(model):
    tokens, more = torch.randint(31, (2, 9)), torch.randint(31, (2, 4))
    _, mems = inputs_of(model, tokens, lengths=torch.tensor([9, 3]))
    found, _ = inputs_of(model, more, mems)
    for row, n in enumerate((9, 3)):
        whole = torch.cat([tokens[row : row + 1, :n], more[row : row + 1]], 1)
        expected = one_by_one(model, whole, torch.zeros(1, 16))
        torch.testing.assert_close(found[row], expected[0, n:])


def test_the_factors_are_learned_and_no_gradient_passes_the_memory(model):
    tokens = torch.randint(31, (2, 9))
    _, mems = inputs_of(model, tokens)
    assert not mems.states[0].requires_grad
    # One token: what the factors multiply is in the memory alone.
    model(tokens[:, :1], mems, targets=tokens[:, 1:2]).loss.backward()
    assert model.input_decay.grad.abs().min() > 0


@torch.no_grad()
def test_keys_and_values_are_cached_with_the_inputs(model):
    tokens = torch.randint(31, (2, 14))
    first, mems = inputs_of(model, tokens[:, :9])
    kept = model.keep(mems)
    inputs = kept.state_dict()["inputs"]
    assert torch.equal(inputs[0, 0], first[:, 3:])
    again = Memory.from_state_dict(kept.state_dict())
    for memory in (kept, again, kept.select([0, 1]), Memory.cat([kept])):
        found, _ = inputs_of(model, tokens[:, 9:], memory)
        torch.testing.assert_close(found, one_by_one(model, tokens[:, 9:], first[:, -1]))
    plain = TransformerXL(replace(model.config, input_recurrence=False)).double().eval()
    with pytest.raises(ValueError, match="memory"):
        model(tokens, plain.keep(mems))
    with pytest.raises(ValueError, match="memory"):
        plain(tokens, kept)
