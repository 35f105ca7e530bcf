"""Writing with a memory is writing, only quicker."""

import sys

import pytest
import torch

from transformer_xl.generate import Sampler, generate

DRAWS = [
    {"temperature": 0.0},
    {"seed": 1, "temperature": 4.0, "top_k": 9, "top_p": 0.9},
]


@torch.no_grad()
def from_scratch(model, prompt, length, start, settings):
    """Read the whole text anew for each token."""
    sampler, text = Sampler(**({"top_k": None, "top_p": None, "seed": None} | settings)), [*prompt]
    for _ in range(length):
        out = model(torch.tensor([text]), start, mem_len=0)
        text.append(sampler(model.softmax, out.hidden[0, -1]))
    return text[len(prompt) :]


@pytest.mark.parametrize("settings", DRAWS, ids=str)
def test_generation_with_memory_is_recomputation(model, settings):
    prompt, start = [3, 1, 4, 1, 5], model.start_memory(1, mem_len=4)
    expected = from_scratch(model, prompt, 10, start, settings)
    found = list(generate(model, prompt, length=10, mems=start, mem_len=100, **settings))
    assert found == expected
    assert settings.get("seed") is None or len(set(found)) > 1


def test_a_memory_that_is_too_short_writes_another_text(paper):
    expected = from_scratch(paper, [3, 1, 4], 10, paper.start_memory(1), DRAWS[1])
    assert list(generate(paper, [3, 1, 4], length=10, mem_len=100, **DRAWS[1])) == expected
    assert list(generate(paper, [3, 1, 4], length=10, mem_len=1, **DRAWS[1])) != expected


def test_a_long_prompt_read_in_pieces_is_the_same_prompt(model, monkeypatch):
    def text():
        mems = model.start_memory(1, mem_len=4)
        return list(generate(model, range(11), length=5, mems=mems, mem_len=100, **DRAWS[1]))

    expected = text()
    # By way of the module: `transformer_xl.generate` is the function.
    monkeypatch.setattr(sys.modules["transformer_xl.generate"], "_PROMPT_SEGMENT", 4)
    assert text() == expected


def test_a_text_goes_on_where_it_stopped(model):
    whole = list(generate(model, [7, 2], length=12, temperature=0))
    first = generate(model, [7, 2], length=8, temperature=0)
    begun = list(first)
    second = generate(model, [first.last_token], length=4, mems=first.mems, temperature=0)
    assert begun + list(second) == whole
