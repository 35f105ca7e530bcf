"""An LSTM with the dropout of AWD-LSTM: on hidden-to-hidden weights, and locked in time."""

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.studies.models.lstm import LSTMModel

V = 31


def model_of(**change: object) -> LSTMModel:
    settings = {"vocab_size": V, "n_layer": 3, "d_model": 12, "mem_len": 0, "dropout": 0.0}
    return LSTMModel(ModelConfig(kind="lstm", **settings | change))


DROPOUTS = [
    {"weight_dropout": 0.5},
    {"dropout": 0.4, "variational_dropout": True},
    {"weight_dropout": 0.5, "dropout": 0.4, "variational_dropout": True},
    {"weight_dropout": 0.5, "dropout": 0.4},
]


@pytest.mark.parametrize("change", DROPOUTS)
def test_it_is_drawn_in_training_and_not_in_evaluation(change):
    plain, model = model_of().eval(), model_of(**change)
    model.load_state_dict(plain.state_dict())
    tokens = torch.randint(V, (2, 9))
    assert not torch.equal(model(tokens).raw_hidden, model(tokens).raw_hidden)
    model.eval()
    torch.testing.assert_close(model(tokens).log_probs, plain(tokens).log_probs, rtol=0, atol=0)
    first = model(tokens[:, :4])
    parts = [first.hidden, *(model(tokens[:, 4:], first.mems).hidden,)]
    torch.testing.assert_close(torch.cat(parts, 1), plain(tokens).hidden)


@pytest.mark.parametrize("p", [0.5, 1e-9])
def test_weights_are_dropped_once_for_a_segment(p):
    # One layer and a start: all pieces of a segment are read with the same weights.
    model = model_of(weight_dropout=p, n_layer=1)
    starts = torch.zeros(2, 8, dtype=torch.bool)
    starts[0, [0, 4]] = starts[1, [0, 4]] = True
    half = torch.randint(V, (2, 4))
    hidden = model(torch.cat([half, half], 1), starts=starts).hidden
    torch.testing.assert_close(hidden[:, :4], hidden[:, 4:])
    if p < 0.1:
        torch.testing.assert_close(hidden[:, :4], model.eval()(half).hidden)


def test_padded_rows_are_read_as_they_are_alone_but_for_dropout():
    model = model_of(weight_dropout=0.3, dropout=0.3, variational_dropout=True, input_dropout=0.0)
    model.config = model_of(weight_dropout=0.3, input_dropout=0.0).config
    tokens, lengths = torch.randint(V, (3, 6)), torch.tensor([2, 6, 0])
    torch.manual_seed(1)
    whole = model(tokens)
    torch.manual_seed(1)
    found = model(tokens, lengths=lengths)
    torch.testing.assert_close(found.raw_hidden[0, :2], whole.raw_hidden[0, :2])
    torch.testing.assert_close(found.raw_hidden[1], whole.raw_hidden[1])
    torch.testing.assert_close(found.mems.states[2][1], whole.mems.states[2][1])
    assert not any(state[2].any() for state in found.mems.states)


def test_a_mask_between_layers_is_the_same_at_all_positions():
    model = model_of(dropout=0.5, variational_dropout=True, n_layer=2, input_dropout=0.0)
    drawn = model._draw(4)
    (mask,) = drawn.masks
    assert mask.shape == (4, 1, 12)
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(drawn.weights[0], model.lstm.weight_hh_l0)


def test_all_weights_learn_and_dropped_ones_do_not():
    model = model_of(weight_dropout=0.5, n_layer=1)
    tokens = torch.randint(V, (4, 20))
    model(tokens[:, :-1], targets=tokens[:, 1:]).loss.backward()
    grad = model.lstm.weight_hh_l0.grad
    assert 0.3 < (grad == 0).float().mean() < 0.7
    assert all(x.grad is not None and x.grad.any() for x in model.parameters())


def test_other_kinds_have_no_such_weights():
    with pytest.raises(ValueError, match=r"weight_dropout=0.5 has no effect with kind='tra"):
        ModelConfig(weight_dropout=0.5)
