from dataclasses import replace
from inspect import unwrap
from typing import get_args

import pytest
import torch

from transformer_xl.cli import loading
from transformer_xl.inference.evaluate import WithMemory, evaluate
from transformer_xl.inference.generate import generate
from transformer_xl.model import TransformerXL
from transformer_xl.model.compact import Weights, compact

VARIANTS = {
    "paper": {},
    "pre-norm": {"norm_first": True, "final_norm": True},
    "raw queries": {"norm_first": True, "quirks": ("raw_queries",)},
    "narrow embeddings": {"d_embed": 5},
    "adaptive": {"cutoffs": (8, 20), "div_val": 2, "d_embed": 8},
    "one table in clusters": {"cutoffs": (8, 20)},
    "untied": {"tie_embeddings": False},
    "learned distances": {"attn_type": 1, "n_positions": 9},
    "sinusoids": {"attn_type": 2},
    "learned positions": {"attn_type": 3, "n_positions": 9},
}
SMALL = ["bfloat16", "int8"]


@pytest.fixture(params=VARIANTS)
def model(request, tiny_config):
    return TransformerXL(replace(tiny_config, init_std=0.2, **VARIANTS[request.param])).eval()


@pytest.fixture
def paper(tiny_config):
    return TransformerXL(tiny_config).eval()


def test_a_compact_model_predicts_nearly_the_same_and_writes(model):
    before = {name: x.clone() for name, x in model.named_parameters()}
    text = torch.randint(31, (80,))
    exact = evaluate(model, text, WithMemory(segment_len=16)).nll
    for weights in SMALL:
        made = compact(model, weights)
        found = evaluate(made, text, WithMemory(segment_len=16)).nll
        assert found == pytest.approx(exact, rel=0.02), weights
        assert found != exact, weights
        one, other = (list(generate(made, [1, 2, 3], length=6, seed=1)) for _ in range(2))
        assert one == other, weights
        assert (made.device, made.dtype, made.training) == (model.device, torch.bfloat16, False)
    assert all(torch.equal(x, before[name]) for name, x in model.named_parameters())


@pytest.mark.parametrize("weights", SMALL)
def test_a_token_at_a_time_is_what_a_segment_is(paper, weights):
    made = compact(paper, weights)
    tokens = torch.randint(31, (1, 12))
    with torch.no_grad():
        whole = made(tokens, made.keep(made.start_memory(1)), mem_len=20).log_probs
        mems, parts = made.keep(made.start_memory(1)), []
        for token in tokens.T:
            out = made(token[:, None], mems, mem_len=20)
            mems = out.mems
            parts.append(out.log_probs)
    assert (torch.cat(parts, 1) - whole).abs().max() < 0.05


def test_fewer_bits_take_less_memory(paper):
    exact = sum(x.nbytes for x in paper.parameters())
    half, quarter = (compact(paper, weights).nbytes for weights in SMALL)
    assert half == exact / 2
    assert quarter < half


@pytest.mark.parametrize("weights", SMALL)
def test_tied_tables_stay_one(paper, weights):
    made = compact(paper, weights)
    assert made.embedding.weight is made.softmax.weight


def test_float32_is_the_model_itself(paper):
    assert compact(paper, "float32") is paper


@pytest.mark.parametrize("weights", SMALL)
def test_what_a_compact_model_cannot_do_is_explained(paper, weights, tmp_path):
    made = compact(paper, weights)
    for attempt, message in (
        (made.train, "a compact model cannot be trained: use the model it was made from"),
        (lambda: made.save_pretrained(tmp_path), "a compact model cannot be saved"),
        (made.float, "a compact model stays where and as it is"),
        (lambda: compact(made, weights), "the model is compact already"),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()
    assert list(tmp_path.iterdir()) == []
    assert not any(x.requires_grad for x in made.parameters())


def test_an_unknown_precision_is_named(paper):
    with pytest.raises(ValueError, match="weights='int4' is unknown; choose from float32, bfloat1"):
        unwrap(compact)(paper, "int4")


def test_the_command_line_knows_the_same_precisions():
    assert get_args(loading.Weights) == get_args(Weights)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_it_reads_where_gradients_are_allowed_too(tiny_config, weights):
    model = TransformerXL(tiny_config).eval()
    small, tokens = compact(model, weights), torch.randint(tiny_config.vocab_size, (2, 5))
    with torch.no_grad():
        expected = small(tokens).log_probs
    torch.testing.assert_close(small(tokens).log_probs, expected)
