"""A row of a ragged batch is read as if it were alone, whatever its padding holds."""

from dataclasses import replace

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model import TransformerXL, build_model
from transformer_xl.ops import use_backend

EXACT = {"rtol": 0, "atol": 1e-11}
V = 23
CONFIG = ModelConfig(
    vocab_size=V, n_layer=2, n_head=2, d_model=12, d_inner=20, mem_len=6, dropout=0.0, init_std=0.4
)
VARIANTS = {
    "paper": {},
    "limited, clamped": {"attn_len": 4, "clamp_len": 2, "norm_first": True},
    "zeros": {"start_memory": "zeros"},
    "a layer up": {"enhanced_recurrence": True, "norm_first": True},
    "adaptive": {"cutoffs": (5, 11), "div_val": 2},
    "learned relative": {"attn_type": 1, "n_positions": 9},
    "sinusoids": {"attn_type": 2, "clamp_len": 5},
    "learned": {"attn_type": 3, "n_positions": 7},
    "learned, stored": {"attn_type": 3, "n_positions": 20, "quirks": ("stored_positions",)},
    "lstm": {"kind": "lstm", "n_head": 8, "d_inner": 2048, "mem_len": 0},
}
# Segment by segment: rows that end early, are not there at all, come back, and are whole.
LENGTHS = [[4, 2, 0, 3], [1, 5, 5, 0], [4, 4, 4, 4], [0, 1, 3, 2], [1, 0, 1, 1]]


@pytest.fixture(params=VARIANTS)
def model(request):
    return build_model(replace(CONFIG, **VARIANTS[request.param])).double().eval()


def segments():
    """For each segment tokens, targets and lengths; in the padding stands what cannot be."""
    for lengths in LENGTHS:
        lengths = torch.tensor(lengths)
        tokens, targets = torch.randint(V, (2, len(lengths), int(lengths.max())))
        padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
        yield tokens.masked_fill(padding, 10**6), targets.masked_fill(padding, -100), lengths


def seen(memory, row):
    """What a stream sees of a memory, for each layer."""
    memory = memory.select([row])
    first = 0 if memory.forgotten is None else int(memory.forgotten)
    state = memory.state_dict()
    if memory.has_keys:
        return torch.cat([state["keys"], state["values"]])[:, :, 0, first:]
    return state["states"][:, 0, first:]


@pytest.mark.parametrize("is_kept", [False, True])
@torch.no_grad()
def test_each_row_is_read_as_if_it_were_alone(model, is_kept, request):
    # The backends in turn, so that each stands with each variant and each memory.
    turn = [*VARIANTS].index(request.node.callspec.params["model"]) + is_kept
    backend = ("reference", "skew")[turn % 2]

    def start(rows):
        memory = model.start_memory(rows)
        return model.keep(memory) if is_kept else memory

    mems, alone = start(4), [start(1) for _ in range(4)]
    with use_backend(backend):
        for tokens, targets, lengths in segments():
            out = model(tokens, mems, targets, lengths=lengths)
            losses = []
            for row, n in enumerate(lengths.tolist()):
                if n:
                    some = slice(row, row + 1), slice(n)
                    one = model(tokens[some], alone[row], targets[some])
                    alone[row] = one.mems
                    losses.append(one.nll)
                    torch.testing.assert_close(out.hidden[some], one.hidden, **EXACT)
                    torch.testing.assert_close(out.nll[some], one.nll, **EXACT)
                assert (out.nll[row, n:] == 0).all()
                if len(alone[row]) or model.config.kind != "lstm":
                    # An LSTM that has read nothing remembers nothing, or zeros.
                    torch.testing.assert_close(seen(out.mems, row), seen(alone[row], 0), **EXACT)
            torch.testing.assert_close(out.loss, torch.cat(losses, 1).mean())
            mems = out.mems
            assert len(mems) <= max(model.config.mem_len, 1)


@pytest.mark.parametrize("kind", ["transformer_xl", "lstm"])
def test_the_gradient_is_that_of_the_rows_alone(of_kind, kind):
    model = build_model(of_kind(CONFIG, kind)).double()
    tokens, targets, lengths = next(segments())
    model(tokens, None, targets, lengths=lengths).loss.backward()
    found = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    for row, n in enumerate(lengths.tolist()):
        if n:
            nll = model(tokens[row, None, :n], None, targets[row, None, :n]).nll
            (nll.sum() / lengths.sum()).backward()
    for one, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, **EXACT)


@torch.no_grad()
def test_a_batch_of_empty_rows_has_no_loss_and_changes_no_memory(model):
    tokens = torch.randint(V, (2, 5))
    before = model(tokens).mems
    out = model(tokens, before, tokens, lengths=torch.tensor([0, 0]))
    assert out.loss == 0
    for row in range(2):
        torch.testing.assert_close(seen(out.mems, row), seen(before, row), **EXACT)


def test_vectors_in_the_padding_may_be_no_numbers_and_get_no_gradient():
    model = TransformerXL(CONFIG).double()
    vectors = torch.randn(2, 4, 12, dtype=torch.float64)
    vectors[0, 2:] = torch.nan
    vectors.requires_grad_()
    lengths = torch.tensor([2, 4])
    targets = torch.randint(V, (2, 4))
    out = model(inputs_embeds=vectors, targets=targets, lengths=lengths)
    out.loss.backward()
    assert out.loss.isfinite()
    assert (vectors.grad[0, 2:] == 0).all()
    assert vectors.grad.isfinite().all()
