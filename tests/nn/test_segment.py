"""What cannot be read is refused by name, before anything is computed."""

from dataclasses import replace
from inspect import unwrap

import pytest
import torch

from transformer_xl.model import TransformerXL, build_model


@pytest.fixture(params=["transformer_xl", "lstm"])
def model(request, tiny_config, of_kind):
    return build_model(of_kind(tiny_config, request.param)).eval()


def read(model, *inputs, **options):
    # Unwrapped: the check of types in signatures, where it is on, refuses it before we can.
    return unwrap(type(model).forward)(model, *inputs, **options)


TOKENS = torch.zeros(2, 3, dtype=torch.long)
VECTORS = torch.zeros(2, 3, 16)
FALSE = torch.zeros(2, 3, dtype=torch.bool)


def test_what_does_not_fit_is_named(model):
    for options, message in (
        ({}, "tokens or inputs_embeds: neither of them is given"),
        ({"tokens": TOKENS, "inputs_embeds": VECTORS}, "both of them is given"),
        ({"inputs_embeds": VECTORS[0]}, r"\(3, 16\) .*\(streams, length, d_model=16\)"),
        ({"inputs_embeds": VECTORS[:, :0]}, "and not empty"),
        ({"inputs_embeds": torch.zeros(2, 3, 8)}, r"\(2, 3, 8\) .*d_model=16\)"),
        ({"tokens": TOKENS, "lengths": torch.tensor([1])}, r"\[1\] must be one for each of the 2"),
        ({"tokens": TOKENS, "lengths": torch.tensor([1, 4])}, r"\[1, 4\] must .* from 0 to 3"),
        ({"tokens": TOKENS, "lengths": torch.tensor([-1, 2])}, r"\[-1, 2\] must .* from 0 to 3"),
        ({"tokens": TOKENS, "lengths": torch.tensor([0.5, 2])}, "lengths of torch.float32 must be"),
        ({"tokens": TOKENS, "starts": FALSE[:, :2]}, r"\(2, 2\) .* of shape \(2, 3\)"),
        ({"tokens": TOKENS, "starts": TOKENS}, "torch.int64 must say true or false"),
    ):
        with pytest.raises(ValueError, match=message):
            read(model, **options)


def test_rows_that_end_at_different_places_cannot_be_read_again(tiny_config):
    model = TransformerXL(replace(tiny_config, ext_len=1))
    with pytest.raises(ValueError, match=r"ext_len=1.*set ext_len to 0"):
        model(TOKENS, lengths=torch.tensor([3, 2]))
    # Rows of one length can.
    model(TOKENS, lengths=torch.tensor([3, 3]))


@torch.no_grad()
def test_vectors_are_read_as_they_are(model):
    tokens = torch.randint(31, (2, 5))
    vectors = model.embedding(tokens)
    expected, mems = model(tokens), None
    for segment in vectors.split([2, 3], 1):
        hidden, mems = model.read(inputs_embeds=segment, mems=mems)
    torch.testing.assert_close(hidden, expected.hidden[:, 2:])
    torch.testing.assert_close(model(inputs_embeds=vectors).log_probs, expected.log_probs)
