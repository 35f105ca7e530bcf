"""A text that repeats one sequence is found, and ended or kept from repeating it, in every path."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from transformer_xl import Session
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.inference.generate import generate, generate_batch
from transformer_xl.inference.generate.sampler import loop_period

SHARED = Path(os.environ.get("TXL_SHARED", "../shared"))
LOOP = {"loop_length": 20, "seed": 3}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7], [8, 9], [10], [11]]


@pytest.fixture
def model(model):
    """A model that writes mostly the same token."""
    with torch.no_grad():
        model.softmax.bias[5] = 6
    return model


def slow_period(tokens, length):
    """The definition, word by word."""
    end = list(tokens[-length:])
    periods = range(1, length // 4 + 1) if len(end) == length else ()
    for p in periods:
        if all(end[i] == end[i - p] for i in range(p, length)):
            return p
    return 0


@pytest.mark.parametrize("length", [4, 7, 40, 201])
def test_loops_of_every_period_are_found_and_no_others(length):
    numbers = np.random.default_rng(1)
    for period in range(1, length):
        pattern = numbers.integers(0, 3, period)
        text = np.concatenate([numbers.integers(0, 3, 9), np.resize(pattern, length)])
        assert loop_period(text, length) == slow_period(text, length)
        for end in (len(text) - 1, length - 1):
            assert loop_period(text[:end], length) == slow_period(text[:end], length)
        changed = text.copy()
        changed[-1 - period // 2] += 3
        assert loop_period(changed, length) == 0


def test_source_code_with_lines_of_dashes_and_tables_does_not_loop():
    vocab = train_vocab("bytes", [])
    text = (
        Path(np.__file__).with_name("exceptions.py").read_text(encoding="utf-8")
        + ("# " + "-" * 78 + "\n")
        + "TABLE = [\n"
        + "    [0, 0, 0, 0],\n" * 6
        + "]\n\n\n"
    )
    tokens = np.array(vocab.encode(text), np.int32)
    assert not any(loop_period(tokens[:n], 200) for n in range(200, len(tokens)))


@pytest.mark.skipif(not SHARED.is_dir(), reason="TXL_SHARED names no folder with data")
def test_plays_do_not_loop():
    text = (SHARED / "data/tinyshakespeare/input.txt").read_text(encoding="utf-8")[:200_000]
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    assert not any(loop_period(tokens[:n], 100) for n in range(100, len(tokens)))


def test_a_text_ends_with_the_first_token_that_completes_a_loop(model):
    whole = [*generate(model, [1, 2, 3], length=300, seed=3)]
    written = generate(model, [1, 2, 3], length=300, on_loop="end", **LOOP)
    text = [*written]
    assert written.is_looping
    assert text == whole[: len(text)]
    seen = [1, 2, 3, *text]
    assert slow_period(seen, 20)
    assert not slow_period(seen[:-1], 20)


def test_a_text_of_a_batch_ends_where_it_ends_alone(model):
    settings = {"length": 60, "on_loop": "end", "loop_length": 20}
    alone = [[*generate(model, prompt, seed=3 + n, **settings)] for n, prompt in enumerate(PROMPTS)]
    batch = generate_batch(model, PROMPTS, seed=3, **settings)
    texts = [[] for _ in PROMPTS]
    for step in batch:
        for text, token in step.items():
            texts[text].append(token)
    assert texts == alone
    assert batch.looping == {n for n, text in enumerate(alone) if len(text) < 60}
    assert 0 < len(batch.looping) < len(PROMPTS)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_token_that_would_continue_a_loop_is_excluded(model, temperature):
    settings = {"length": 300, "temperature": temperature, "on_loop": "break", **LOOP}
    seen = [1, 2, 3, *generate(model, [1, 2, 3], **settings)]
    assert len(seen) == 303
    looping = [n for n in range(20, len(seen)) if slow_period(seen[:n], 20)]
    assert len(looping) > 3
    assert all(seen[n] != seen[n - slow_period(seen[:n], 20)] for n in looping)


def test_a_session_ends_a_looping_text_as_generate_does(model):
    symbols = [str(n) for n in range(model.config.vocab_size - 1)]
    session = Session(model, train_vocab("words", [" ".join(symbols)]), seed=3)
    session.write([1, 2, 3])
    expected = [*generate(model, [1, 2, 3], length=300, on_loop="end", **LOOP)]
    [*session.generate(300, on_loop="end", **LOOP)]
    assert session.mark().history.tolist() == [1, 2, 3, *expected]


def test_a_length_without_effect_is_refused(model):
    with pytest.raises(ValueError, match="loop_length=40 has no effect with on_loop='continue'"):
        generate(model, [1], loop_length=40)
    with pytest.raises(ValueError, match="on_loop"):
        generate(model, [1], on_loop="stop")
