"""A recurrent model reads a text as it does at once; tests/laws/test_segments.py, too."""

from pathlib import Path

import pytest
import torch
from tests.laws.conftest import RECURRENT, recurrent

from transformer_xl.inference.evaluate import WithMemory, evaluate
from transformer_xl.inference.generate import Sampling, generate
from transformer_xl.model import LanguageModel, Memory, load_model

V = 23
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
"""Their code computes parts in float32, with weights of any precision."""


@pytest.fixture(params=RECURRENT)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(kind: str) -> LanguageModel:
    return recurrent(kind)


@torch.no_grad()
def test_a_long_text_is_read_as_in_segments(model: LanguageModel) -> None:
    tokens = torch.randint(V, (1, 150))
    whole, first = model(tokens), model(tokens[:, :67])
    second = model(tokens[:, 67:], first.mems)
    torch.testing.assert_close(second.log_probs, whole.log_probs[:, 67:], **TOLERANCE)


@torch.no_grad()
def test_padded_rows_are_read_as_they_are_alone(model: LanguageModel) -> None:
    past, tokens = torch.randint(V, (4, 3)), torch.randint(V, (4, 6))
    lengths = torch.tensor([6, 0, 2, 6])
    mems = model(past).mems
    found = model(tokens, mems, lengths=lengths)
    for row, n in enumerate(lengths.tolist()):
        before, after = mems.select([row]), found.mems.select([row])
        if n:
            alone = model(tokens[[row], :n], before)
            torch.testing.assert_close(found.log_probs[[row], :n], alone.log_probs, **TOLERANCE)
            before = alone.mems
        torch.testing.assert_close(after.seen().states, before.seen().states, **TOLERANCE)


@torch.no_grad()
def test_documents_are_read_as_they_are_alone(model: LanguageModel) -> None:
    mems = model(torch.randint(V, (2, 3))).mems
    tokens, starts = torch.randint(V, (2, 8)), torch.zeros(2, 8, dtype=torch.bool)
    starts[0, [0, 4]] = starts[1, 5] = True
    found = model(tokens, mems, starts=starts).log_probs
    for row, cut, before in ((0, 4, None), (1, 5, mems.select([1]))):
        first, second = tokens[[row], :cut], tokens[[row], cut:]
        torch.testing.assert_close(found[[row], :cut], model(first, before).log_probs, **TOLERANCE)
        torch.testing.assert_close(found[[row], cut:], model(second).log_probs, **TOLERANCE)


@torch.no_grad()
def test_a_memory_is_kept_and_reset(model: LanguageModel) -> None:
    past, tokens = torch.randint(V, (3, 5)), torch.randint(V, (3, 4))
    mems = model(past).mems
    before = [x.clone() for x in mems.states]
    expected = model(tokens, mems).log_probs
    for part in tokens.split(1, 1):
        model(part, mems)
    # What is read does not change the memory that is given.
    torch.testing.assert_close(mems.states, tuple(before), rtol=0, atol=0)
    saved = Memory.from_state_dict(mems.state_dict())
    turned = model(tokens[[2, 0, 1]], saved.select([2, 0, 1])).log_probs
    torch.testing.assert_close(turned, expected[[2, 0, 1]], **TOLERANCE)
    reset = model(tokens, mems.reset([1])).log_probs
    torch.testing.assert_close(reset[[0, 2]], expected[[0, 2]], **TOLERANCE)
    torch.testing.assert_close(reset[1], model(tokens).log_probs[1], **TOLERANCE)


def test_no_gradient_enters_the_memory_and_all_weights_learn(model: LanguageModel) -> None:
    tokens, starts = torch.randint(V, (2, 9)), torch.zeros(2, 8, dtype=torch.bool)
    # A document of one token: their code for single tokens writes in place.
    starts[0, [3, 4]] = True
    model.train()
    first = model(tokens[:, :-1], targets=tokens[:, 1:])
    assert not any(state.requires_grad for state in first.mems.states)
    model(tokens[:, :-1], first.mems, tokens[:, 1:], starts=starts).loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not missing


def test_gradients_cross_the_start_of_another_document(model: LanguageModel) -> None:
    tokens = torch.randint(V, (2, 8))
    vectors = torch.randn(2, 8, 16, requires_grad=True)
    starts = torch.zeros(2, 8, dtype=torch.bool)
    starts[0, 4] = True
    whole = model(None, None, tokens, inputs_embeds=vectors).loss
    (expected,) = torch.autograd.grad(whole, vectors)
    cut = model(None, None, tokens, inputs_embeds=vectors, starts=starts).loss
    (found,) = torch.autograd.grad(cut, vectors)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "kind",
    # How transformers' models learn is not ours to prove.
    [kind if kind == "lstm" else pytest.param(kind, marks=pytest.mark.slow) for kind in RECURRENT],
)
def test_it_learns_and_evaluates_and_writes(kind: str) -> None:
    model, text = recurrent(kind, is_prepared=False, vocab_size=5).train(), torch.arange(400) % 5
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(text[None, :40], targets=text[None, 1:41]).loss.backward()
        optimizer.step()
    model.eval()
    assert evaluate(model, text, WithMemory(segment_len=16)).nll < 0.1
    assert evaluate(model, text, WithMemory(segment_len=7, batch_size=3, mem_len=20)).nll < 0.1
    assert list(generate(model, [0, 1, 2], length=6, sampling=Sampling(temperature=0))) == [
        3,
        4,
        0,
        1,
        2,
        3,
    ]


@pytest.mark.slow
def test_a_folder_holds_it(kind: str, tmp_path: Path) -> None:
    clusters = {"cutoffs": (10, 20), "div_val": 2}
    for n, change in enumerate((clusters, {"d_embed": 6}, {"tie_embeddings": False})):
        model = recurrent(kind, is_prepared=False, **change)
        (tmp_path / f"{n}").mkdir()
        model.save_pretrained(tmp_path / f"{n}")
        loaded, tokens = load_model(tmp_path / f"{n}"), torch.randint(V, (2, 9))
        with torch.no_grad():
            torch.testing.assert_close(loaded(tokens).log_probs, model(tokens).log_probs)


def test_read_text_is_not_taken_back(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match=r"ext_len=2: a model of kind=.* cannot take back"):
        model.read(torch.randint(V, (2, 4)), ext_len=2)
