"""The laws hold for real-valued inputs and outputs, for models of every kind."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model import Decoder, build_model
from transformer_xl.model.segment import Lengths

EXACT = {"rtol": 0, "atol": 1e-11}
F, L = 3, 14
BODY = ModelConfig(
    n_features=F,
    vocab_size=5,
    n_layer=2,
    n_head=2,
    d_model=12,
    d_inner=20,
    mem_len=30,
    dropout=0.0,
    init_std=0.4,
)
KINDS = {
    "post-norm": {},
    "pre-norm": {"norm_first": True, "final_norm": True, "embedding_residual": True},
    "gpt": {"kind": "gpt"},
    "lstm": {"kind": "lstm", "n_head": 8, "d_inner": 2048},
}
ENDS = {"classes": {}, "numbers": {"vocab_size": 0, "n_mixtures": 2}}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(params=ENDS)
def end(request):
    return ENDS[request.param]


def made(kind, end):
    torch.manual_seed(2)
    return build_model(replace(BODY, **kind, **end)).double().eval()


def given(end):
    torch.manual_seed(3)
    inputs = torch.randn(2, L, F, dtype=torch.float64)
    targets = torch.randn(2, L, dtype=torch.float64) if end else torch.randint(5, (2, L))
    return inputs, targets


@torch.no_grad()
def test_in_segments_is_as_at_once(kind, end):
    model, (inputs, targets) = made(kind, end), given(end)
    whole = model(inputs, None, targets)
    for T, is_kept in product((1, 4, 5), (False, True)):
        mems = model.start_memory(2)
        mems, nll = model.keep(mems) if is_kept else mems, []
        for some in torch.arange(L).split(T):
            out = model(inputs[:, some], mems, targets[:, some])
            mems = out.mems
            nll.append(out.nll)
        torch.testing.assert_close(torch.cat(nll, 1), whole.nll, **EXACT)


@torch.no_grad()
def test_the_decoder_streams_as_at_once(kind, end):
    model, (inputs, _) = made(kind, end), given(end)
    decoder = Decoder.of(model, Lengths.of(model.config), model.start_memory(2))
    found = torch.stack([decoder(inputs[:, n]) for n in range(L)], 1)
    torch.testing.assert_close(found, model.read(inputs)[0], **EXACT)
    with pytest.raises(ValueError, match=r"\(2, 4\) must be a vector of n_features=3 for each"):
        decoder(torch.zeros(2, 4))


@torch.no_grad()
def test_a_recording_is_read_as_if_it_were_alone(kind, end):
    model, (inputs, targets) = made(kind, end), given(end)
    starts = torch.zeros(2, L, dtype=torch.bool)
    starts[0, 6] = starts[1, 3] = True
    packed, mems = [], None
    for some in torch.arange(L).split(5):
        out = model(inputs[:, some], mems, targets[:, some], starts=starts[:, some])
        mems = out.mems
        packed.append(out.nll)
    packed = torch.cat(packed, 1)
    for row, first in ((0, 6), (1, 3)):
        alone = model(inputs[row : row + 1, first:], None, targets[row : row + 1, first:])
        torch.testing.assert_close(packed[row : row + 1, first:], alone.nll, **EXACT)


@pytest.mark.parametrize(
    ("end", "tokens", "targets", "message"),
    [
        ("classes", torch.zeros(2, 4, dtype=torch.int64), None, r"int64 must be real vectors"),
        ("classes", torch.zeros(2, 4, F + 1), None, r"\(streams, length, n_features=3\)"),
        ("classes", torch.zeros(2, 0, F), None, "not empty"),
        ("classes", torch.zeros(2, 4, F), torch.zeros(2, 4), "must be integers"),
        ("numbers", torch.zeros(2, 4, F), torch.zeros(2, 4).long(), "must be real numbers"),
    ],
)
def test_wrong_inputs_and_targets_are_named(end, tokens, targets, message):
    model = made({}, ENDS[end]).float()
    with pytest.raises(ValueError, match=message):
        model(tokens, None, targets)


def test_a_mixture_has_no_probabilities_of_tokens():
    model, (inputs, _) = made({}, ENDS["numbers"]), given({"n_mixtures": 2})
    out = model(inputs)
    assert out.log_probs is None
    assert out.mixture.means.shape == (2, L, 2)
    with pytest.raises(ValueError, match="n_mixtures=2: the model predicts real numbers"):
        model.head.log_probs(out.hidden)
