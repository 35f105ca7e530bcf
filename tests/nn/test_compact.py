from inspect import unwrap

import pytest
import torch

from transformer_xl.model.quantizing import compact

SMALL = ["bfloat16", "int8", "int4"]


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
    half, quarter, eighth = (compact(paper, weights).nbytes for weights in SMALL)
    assert half == exact / 2
    assert eighth < quarter < half


@pytest.mark.parametrize("weights", SMALL)
def test_what_a_compact_model_cannot_do_is_explained(paper, weights, tmp_path):
    made = compact(paper, weights)
    for attempt, message in (
        (made.train, "a compact model cannot learn: use the model it was made from"),
        (lambda: made.save_pretrained(tmp_path), "a compact model cannot be saved"),
        (made.float, "a compact model stays where and as it is"),
        (lambda: compact(made, weights), "the model is compact already"),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()
    assert list(tmp_path.iterdir()) == []
    assert not any(x.requires_grad for x in made.parameters())


def test_an_unknown_precision_is_named(paper):
    with pytest.raises(ValueError, match="weights='int3' is unknown; choose from float32, bfloat1"):
        unwrap(compact)(paper, "int3")
