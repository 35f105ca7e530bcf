"""Which targets count, and what is taken for tokens and targets at all."""

from dataclasses import replace
from inspect import unwrap

import pytest
import torch
from tests.nn.conftest import tokens

from transformer_xl.model import TransformerXL, build_model
from transformer_xl.model.arguments import as_tokens


@pytest.fixture
def model(tiny_config):
    return TransformerXL(tiny_config)


@pytest.mark.parametrize(
    "options",
    [{}, {"cutoffs": (6, 12)}, {"cutoffs": (6, 12), "div_val": 2}],
    ids=str,
)
@pytest.mark.parametrize("is_training", [True, False])
def test_targets_of_minus_100_are_ignored(tiny_config, options, is_training):
    model = TransformerXL(replace(tiny_config, **options)).train(is_training)
    segment, targets = tokens(), tokens()
    ignored = torch.tensor([[True, False, False, True], [False, True, False, False]])

    def losses(targets):
        torch.manual_seed(1)
        out = model(segment, targets=targets)
        model.zero_grad()
        out.nll[~ignored].mean().backward()
        found = {name: x.grad.clone() for name, x in model.named_parameters()}
        return model(segment, targets=targets), out.nll, found

    _, whole, expected = losses(targets)
    out, nll, found = losses(targets.masked_fill(ignored, -100))
    torch.testing.assert_close(nll, whole.masked_fill(ignored, 0.0))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(out.loss, out.nll[~ignored].mean())
    model.zero_grad()
    out.loss.backward()
    found = {name: x.grad for name, x in model.named_parameters()}
    torch.testing.assert_close(found, expected)


def test_without_any_target_the_loss_is_zero_and_so_are_its_gradients(model):
    out = model(tokens(), targets=torch.full((2, 4), -100))
    out.loss.backward()
    assert out.loss == 0
    assert not any(x.grad.any() for x in model.parameters() if x.grad is not None)


def test_padding_and_targets_of_minus_100_count_neither(model):
    targets = tokens()
    targets[0, 0] = -100
    out = model(tokens(), targets=targets, lengths=torch.tensor([3, 4]))
    assert not out.nll[0, [0, 3]].any()
    torch.testing.assert_close(out.loss, out.nll.sum() / 6)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16], ids=str
)
def test_integers_of_every_width_are_tokens_and_targets(model, dtype):
    segment, targets = tokens(), tokens()
    expected = model(segment, targets=targets).nll
    assert torch.equal(model(segment.to(dtype), targets=targets.to(dtype)).nll, expected)


def test_what_is_no_tensor_of_the_right_type_is_named(model, refused):
    for given, message in (
        ({"tokens": [[1, 2]]}, "tokens must be a tensor, not a list"),
        ({"tokens": torch.ones(1, 2)}, "tokens of torch.float32 must be integers"),
        ({"tokens": torch.ones(1, 2).bool()}, "tokens of torch.bool must be integers"),
        ({"tokens": tokens()[None]}, r"tokens of shape \(1, 2, 4\)"),
        ({"tokens": torch.tensor(1)}, r"tokens of shape \(\)"),
        ({"tokens": tokens()[:0]}, r"tokens of shape \(0, 4\) .* not empty"),
        ({"targets": [[1, 2]]}, "targets must be a tensor, not a list"),
        ({"targets": torch.ones(2, 4)}, "targets of torch.float32 must be integers"),
        ({"targets": torch.tensor(1)}, r"targets of shape \(\)"),
        ({"targets": tokens()[0]}, r"targets of shape \(4,\)"),
        ({"lengths": [4, 4]}, "lengths must be a tensor, not a list"),
        ({"lengths": torch.ones(2).bool()}, "lengths of torch.bool must be integers"),
        ({"starts": [True]}, "starts must be a tensor, not a list"),
        ({"tokens": None, "inputs_embeds": [1.0]}, "inputs_embeds must be a tensor"),
        ({"tokens": None, "inputs_embeds": torch.ones(2, 4, 16).long()}, "inputs_embeds of shape"),
        ({"mems": [torch.zeros(2, 0, 16)] * 3}, "is no memory"),
    ):
        with refused(message):
            unwrap(TransformerXL.forward)(model, **{"tokens": tokens(), **given})


OUTSIDE = "token {}{} is outside the vocabulary of 31 .*another one; it is at row 1, position 2"


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"cutoffs": (6, 12)}, {"cutoffs": (6, 12), "div_val": 2}),
        *({"kind": "gpt"}, {"kind": "lstm"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_training", [True, False])
def test_what_is_outside_the_vocabulary_is_named_with_its_place(
    tiny_config, of_kind, options, is_training
):
    config = of_kind(tiny_config, options.get("kind", "transformer_xl"))
    model = build_model(replace(config, **options)).train(is_training)
    for wrong in (31, -1, 2**40):
        given = tokens()
        given[1, 2] = wrong
        for call in (model, model.read):
            with pytest.raises(ValueError, match=OUTSIDE.format(wrong, "")):
                call(given)
        given[0, 0] = -100
        with pytest.raises(ValueError, match=OUTSIDE.format(wrong, " of the targets")):
            model(tokens(), targets=given)
    with pytest.raises(ValueError, match=r"; -100 would be ignored$"):
        model(tokens(), targets=torch.full((2, 4), -1))


def test_padding_may_be_outside_the_vocabulary(model):
    given = torch.tensor([[1, 2, 99], [3, -100, -100]])
    out = model(given, targets=given, lengths=torch.tensor([2, 1]))
    assert out.nll.isfinite().all()
    assert not out.nll[0, 2]


def test_another_error_stays_what_it_is(model, monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(model.embedding, "forward", fail)
    with pytest.raises(RuntimeError, match=r"^no memory$"):
        model(tokens())


def test_bytes_are_tokens_of_a_vocabulary_of_bytes_alone(tiny_config):
    assert as_tokens(b"ab", replace(tiny_config, vocab_size=256)).tolist() == [97, 98]
    with pytest.raises(ValueError, match=r"not the text b'ab', of which vocab\.encode makes them"):
        as_tokens(b"ab", tiny_config)
