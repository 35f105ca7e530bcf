from dataclasses import replace

import pytest
import torch

from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.inference.generate import (
    History,
    Sampler,
    Sampling,
    TextWriter,
    generate,
    generate_batch,
)
from transformer_xl.model import TransformerXL

BYTES = train_vocab("bytes", [])


def test_a_step_has_a_token_for_each_text_that_goes_on(model, refused):
    found = generate_batch(model, [[1], [2, 3]], length=3, seed=1)
    assert [sorted(step) for step in found] == [[0, 1]] * 3
    found = generate_batch(model, [[1], [2, 3], [4]], seed=1)
    found.end(1)
    assert sorted(next(found)) == [0, 2]
    found.end(0)
    found.end(2)
    assert list(found) == []
    with refused("give a list of prompts, one at least"):
        generate_batch(model, [], length=3)


def test_memories_that_do_not_fit_the_prompts_are_named(model):
    with pytest.raises(ValueError, match=r"mems holds 2 streams for 3 prompts: give one for all"):
        generate_batch(model, [[1]] * 3, mems=model.start_memory(2))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 2.0}], ids=str
)
def test_a_model_with_damaged_weights_is_named(model, settings, value):
    model.softmax.bias.data[3] = value
    with pytest.raises(RuntimeError, match="probabilities are not finite: its weights are damaged"):
        next(generate(model, [1], Sampling(**settings)))


STEPS = {
    "embedding": lambda model: (type(model.embedding), "forward", 1),
    "draw": lambda model: (Sampler, "__call__", 1),
    "first history": lambda model: (History, "append", 1),
    "second history": lambda model: (History, "append", 2),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("is_after", [False, True])
def test_an_interrupt_leaves_all_as_it_was(model, monkeypatch, step, is_after):
    loops = {"on_loop": "break", "loop_min_length": 20}
    sampling = Sampling(repetition_penalty=1.3, dry_multiplier=0.8, **loops)
    how = {"sampling": sampling, "length": 12, "seed": 4}
    whole = list(generate_batch(model, [[1], [2, 3]], **how))
    batch = generate_batch(model, [[1], [2, 3]], **how)
    found, calls = [next(batch) for _ in range(5)], []
    owner, name, n = STEPS[step](model)
    original = getattr(owner, name)

    def interrupted(*given, **named):
        calls.append(original(*given, **named) if is_after else None)
        if len(calls) == n:
            raise KeyboardInterrupt
        return calls[-1] if is_after else original(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(batch)
    assert found + list(batch) == whole


def test_each_text_ends_at_its_own_stop_string(tiny_config):
    model = TransformerXL(replace(tiny_config, vocab_size=256, init_std=0.3)).eval()
    prompts = [b"one ", b"two", b"three"]
    settings = {"length": 30, "seed": 5}
    alone = [list(generate(model, prompts[n], length=30, seed=5 + n)) for n in range(3)]
    expected = [BYTES.decode(ids) for ids in alone]
    batch = generate_batch(model, prompts, **settings)
    assert batch.decode(BYTES) == expected
    stop = expected[1][4:6]
    batch = generate_batch(model, prompts, **settings)
    found = batch.decode(BYTES, (stop,))
    assert found == [text.partition(stop)[0] for text in expected]
    assert 1 not in batch.texts
    assert generate(model, prompts[1], length=30, seed=6).decode(BYTES) == expected[1]
    # From where a batch is: what was drawn before is not repeated.
    batch = generate_batch(model, prompts, **settings)
    next(batch)
    rests = [TextWriter(BYTES, prompt=ids[:1]).pieces(ids[1:]) for ids in alone]
    assert batch.decode(BYTES) == ["".join(pieces) for pieces in rests]
    assert batch.decode(BYTES) == ["", "", ""]


def test_to_decode_a_text_without_end_needs_a_stop_string(model, refused):
    with refused("length=None draws without end"):
        generate_batch(model, [[1], [2]]).decode(BYTES)
