"""Documents in one pack are read as if each were alone."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model import build_model
from transformer_xl.ops import skew, use_backend

EXACT = {"rtol": 0, "atol": 1e-11}
V = 23
CONFIG = ModelConfig(
    vocab_size=V, n_layer=2, n_head=2, d_model=12, d_inner=20, mem_len=6, dropout=0.0, init_std=0.4
)
RELATIVE = {
    "paper": {},
    "limited, clamped": {"attn_len": 4, "clamp_len": 2, "norm_first": True},
    "learned relative": {"attn_type": 1, "n_positions": 9},
}
ABSOLUTE = {
    "sinusoids": {"attn_type": 2, "clamp_len": 5},
    "learned": {"attn_type": 3, "n_positions": 7},
}
LSTM = {"lstm": {"kind": "lstm", "n_head": 8, "d_inner": 2048, "mem_len": 0}}
ALL = RELATIVE | ABSOLUTE | LSTM
# Of two streams, how long one document after the other is; the same number of tokens in all.
DOCUMENTS = [[3, 1, 7, 2, 1, 1, 5], [9, 4, 6, 1]]


def made(name):
    return build_model(replace(CONFIG, **ALL[name])).double().eval()


@pytest.fixture(params=["reference", "skew"])
def backend(request, monkeypatch):
    # More than one block of queries.
    monkeypatch.setattr(skew, "QUERY_BLOCK", 3)
    with use_backend(request.param):
        yield request.param


# The backends in turn, so that each stands with each model and each memory.
IN_TURN = pytest.mark.parametrize(
    ("name", "is_kept", "backend"),
    [
        (name, is_kept, ("reference", "skew")[(n + is_kept) % 2])
        for n, name in enumerate(ALL)
        for is_kept in (False, True)
    ],
    indirect=["backend"],
)


def packed():
    """Tokens and targets of streams of documents, and where these begin."""
    tokens = torch.randint(V, (2, sum(DOCUMENTS[0]) + 1))
    starts = torch.zeros(tokens[:, 1:].shape, dtype=torch.bool)
    for row, lengths in enumerate(DOCUMENTS):
        # A stream goes on with what came before it, of which there is nothing.
        for place in torch.tensor([0, *lengths])[:-1].cumsum(0).tolist():
            starts[row, place] = True
    return tokens[:, :-1], tokens[:, 1:], starts


def each_document(starts):
    for row, places in enumerate(starts):
        cuts = [*places.nonzero()[:, 0].tolist(), len(places)]
        for start, stop in pairwise(cuts):
            yield slice(row, row + 1), slice(start, stop)


@pytest.mark.parametrize("name", RELATIVE | LSTM)
@torch.no_grad()
def test_a_document_in_a_pack_is_read_as_if_it_were_alone(name, backend):
    model = made(name)
    tokens, targets, starts = packed()
    places = [*each_document(starts)]
    expected = [model(tokens[place], None, targets[place]) for place in places]
    for T in (1, 4, 20):
        # With the other backend the other way about.
        is_kept = (T == 4) == (backend == "skew")
        mems = model.start_memory(2)
        mems = model.keep(mems) if is_kept else mems
        hidden, nll = [], []
        for some in torch.arange(20).split(T):
            segment, follows = tokens[:, some], targets[:, some]
            out = model(segment, mems, follows, starts=starts[:, some], mem_len=100)
            hidden.append(out.hidden)
            nll.append(out.nll)
            mems = out.mems
        hidden, nll = torch.cat(hidden, 1), torch.cat(nll, 1)
        for place, alone in zip(places, expected, strict=True):
            torch.testing.assert_close(hidden[place], alone.hidden, **EXACT)
            torch.testing.assert_close(nll[place], alone.nll, **EXACT)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.usefixtures("backend")
def test_no_gradient_crosses_the_start_of_a_document(name):
    model = made(name)
    mems = model(torch.randint(V, (2, 5))).mems
    vectors = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    starts = torch.zeros(2, 7, dtype=torch.bool)
    starts[0, 4] = True
    hidden, _ = model.read(inputs_embeds=vectors, mems=mems, starts=starts)
    hidden[:, 4:].sum().backward()
    assert (vectors.grad[0, :4] == 0).all()
    assert (vectors.grad[0, 4:] != 0).any(-1).all()
    assert (vectors.grad[1] != 0).any(-1).all()


@IN_TURN
@torch.no_grad()
def test_what_stands_before_a_document_changes_nothing_in_it_nor_after_it(name, is_kept, backend):
    model, place = made(name), 3
    tokens = torch.randint(V, (1, 12)).expand(2, -1).clone()
    tokens[1, :place] = torch.randint(V, (place,))
    mems = model(torch.randint(V, (2, 5))).mems
    mems = model.keep(mems) if is_kept else mems
    starts = torch.zeros(2, 8, dtype=torch.bool)
    starts[:, place] = True
    out = model(tokens[:, :8], mems, starts=starts)
    after = model(tokens[:, 8:], out.mems)
    torch.testing.assert_close(out.hidden[0, place:], out.hidden[1, place:], **EXACT)
    torch.testing.assert_close(after.hidden[0], after.hidden[1], **EXACT)
    # Before it, each goes on with its own past.
    expected = model(tokens[:, :8], mems).hidden[:, :place]
    torch.testing.assert_close(out.hidden[:, :place], expected, **EXACT)


@pytest.mark.parametrize("name", ABSOLUTE)
@torch.no_grad()
def test_with_absolute_positions_a_document_is_read_as_alone_at_its_place(name):
    model = made(name)
    tokens, _, starts = packed()
    found = model(tokens, starts=starts).hidden
    for row, some in each_document(starts):
        # As far from the end as in the pack; what follows cannot be seen.
        alone = model(tokens[row, some.start :]).hidden[:, : some.stop - some.start]
        torch.testing.assert_close(found[row, some], alone, **EXACT)
