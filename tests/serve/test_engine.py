"""Each text gets the tokens that it would get alone, whatever else is written, or fails."""

import random

import pytest
import torch

from transformer_xl.apps.serve.errors import NotStartedError
from transformer_xl.inference.generate import Sampler, Sampling, generate

SETTINGS = ({}, {"temperature": 0}, {"top_k": 7}, {"top_p": 0.8, "temperature": 1.5})


def prompts(count, longest, size, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(size) for _ in range(draw.randint(1, longest))] for _ in range(count)]


VARIANTS = {
    "the paper's": {},
    "no memory": {"mem_len": 0},
    "a window": {"attn_len": 5},
    "starting with zeros": {"start_memory": "zeros"},
    "Shaw's positions": {"attn_type": 1, "n_positions": 600},
    "absolute positions": {"attn_type": 2},
    "enhanced recurrence": {"enhanced_recurrence": True},
    "documents": {"reset_at": 7},
    "documents, absolute": {"reset_at": 7, "attn_type": 2},
    "adaptive softmax": {"cutoffs": (8, 20), "div_val": 2, "d_embed": 8},
    "LSTM": {"kind": "lstm", "n_head": 8, "d_inner": 2048},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_texts_side_by_side_are_those_written_alone(make_model, start, ask, variant):
    made = make_model(**VARIANTS[variant])
    engine = start(made.model, max_batch=5, max_queue=100, piece=16)
    asked = []
    for number, prompt in enumerate(prompts(8, 40, len(made.vocab))):
        drawing = SETTINGS[number % len(SETTINGS)]
        asked.append(ask(made, prompt, 1 + 5 * (number % 4), seed=number, drawing=drawing))
    for each in asked:
        engine.submit([each.text])
    for number, each in enumerate(asked):
        text, sampling = each.text, Sampling(**SETTINGS[number % len(SETTINGS)])
        alone = generate(made.model, text.prompt, sampling, length=text.max_tokens, seed=number)
        assert each.tokens == list(alone), f"text {number}"


def test_a_prompt_longer_than_a_segment_is_read_as_one_reading_of_it(made, start, ask):
    engine = start(max_batch=4, piece=100)
    long = prompts(3, 1, len(made.vocab), seed=5)
    draw = random.Random(1)
    long = [[draw.randrange(len(made.vocab)) for _ in range(n)] for n in (511, 1030, 700)]
    asked = [ask(made, prompt, 9, seed=2) for prompt in long]
    for each in asked:
        engine.submit([each.text])
    for each, prompt in zip(asked, long, strict=True):
        assert each.tokens == list(generate(made.model, prompt, length=9, seed=2))


def test_others_are_written_while_a_long_prompt_is_read(made, start, ask, until):
    seen = []
    engine = start(piece=16, deliver=lambda parts: seen.append([text for text, _ in parts]))
    short, long = ask(made, [1], 60), ask(made, [2] * 400, 1)
    engine.submit([short.text])
    engine.submit([long.text])
    until(lambda: any(long.text in texts for texts in seen))
    before = seen[: next(n for n, texts in enumerate(seen) if long.text in texts)]
    # Twenty-five pieces, and a token of the other between any two.
    assert sum(short.text in texts for texts in before) >= 20


@pytest.mark.parametrize("variant", ["the paper's", "documents", "absolute positions", "LSTM"])
def test_a_state_goes_on_as_if_it_had_not_stopped(make_model, start, ask, variant):
    made = make_model(**VARIANTS[variant])
    engine = start(made.model)
    whole = list(generate(made.model, [7, 2, 9], length=40, seed=3))
    first = ask(made, [7, 2, 9], 15, seed=3, keeps_state=True)
    others = [ask(made, [n], 20 + n) for n in range(3)]
    for each in (*others, first):
        engine.submit([each.text])
    state = first.end().state
    assert state.last_token == whole[14]
    assert state.tokens.tolist() == [7, 2, 9, *whole[:15]]
    assert state.n_tokens == 18
    rest = ask(made, [state.last_token], 25, seed=state.random, state=state)
    engine.submit([rest.text])
    assert first.tokens + rest.tokens == whole


def test_reading_without_writing_leaves_the_last_token_to_the_next(made, start, ask):
    engine = start()
    ids = list(range(made.model.config.mem_len))
    first = ask(made, ids, 0, keeps_state=True)
    engine.submit([first.text])
    state = first.end().state
    assert state.last_token == ids[-1]
    second = ask(made, [state.last_token], 8, seed=4, state=state)
    engine.submit([second.text])
    assert second.tokens == list(generate(made.model, ids, length=8, seed=4))


def test_scores_are_those_of_the_model(made, start, ask):
    ids = prompts(1, 40, len(made.vocab), seed=3)[0]
    asked = ask(made, ids, 5, logprobs=3)
    engine = start(piece=8)
    engine.submit([asked.text])
    mems, read = None, ids
    for token in [token for part in asked.parts for token in part.tokens] if asked.end() else ():
        out = made.model(torch.tensor([read]), mems, attn_len=made.model.config.mem_len + 1)
        log_probs, mems, read = out.log_probs[0, -1].log_softmax(-1), out.mems, [token.id]
        assert token.scored.log_prob == pytest.approx(log_probs[token.id].item(), abs=1e-4)
        values, likeliest = log_probs.topk(3)
        assert [each for each, _ in token.scored.top] == likeliest.tolist()
        assert [x for _, x in token.scored.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert len(asked.tokens) == 5


def test_who_leaves_frees_the_place_and_keeps_what_was_written(made, start, ask, until):
    engine = start(max_batch=1)
    left = ask(made, [3], 100_000, keeps_state=True)
    waits = ask(made, [1, 2], 6)
    engine.submit([left.text])
    engine.submit([waits.text])
    until(lambda: len(left.parts) > 5)
    assert engine.n_waiting == 1
    left.text.is_cancelled = True
    assert waits.tokens == list(generate(made.model, [1, 2], length=6, seed=1))
    ended = left.end()
    assert ended.reason == "cancelled"
    assert ended.state.last_token == left.tokens[-1]


def test_stopping_ends_all_and_keeps_their_states(made, start, ask, until):
    engine = start(max_batch=2)
    asked = [ask(made, [n], 100_000, keeps_state=True) for n in range(3)]
    for each in asked:
        engine.submit([each.text])
    until(lambda: all(len(each.parts) > 2 for each in asked[:2]))
    engine.stop()
    assert [each.end().reason for each in asked] == ["length", "length", "stopping"]
    assert [each.end().state is not None for each in asked] == [True, True, False]
    with pytest.raises(NotStartedError, match="is stopping"):
        engine.submit([asked[0].text])


def test_a_step_that_fails_takes_no_text_that_comes_after_it(made, start, ask, monkeypatch, caplog):
    engine = start()
    original, broken = type(made.model).forward, [True]

    def breaks(self, *words, **settings):
        if broken and broken.pop():
            raise RuntimeError("the memory of the device is full")
        return original(self, *words, **settings)

    monkeypatch.setattr(type(made.model), "forward", breaks)
    first = ask(made, [1, 2], 6)
    engine.submit([first.text])
    assert first.end().reason == "failed"
    second = ask(made, [1, 2], 6)
    engine.submit([second.text])
    assert second.tokens == list(generate(made.model, [1, 2], length=6, seed=1))
    assert "the memory of the device is full" in caplog.text


@pytest.mark.parametrize("place", [0, 3])
def test_a_token_that_cannot_be_drawn_ends_its_own_text_alone(
    made, start, ask, monkeypatch, caplog, place
):
    original, generator = Sampler.__call__, torch.Generator().manual_seed(13)
    fatal = [torch.rand((), dtype=torch.float64, generator=generator).item() for _ in range(4)]

    def breaks(self, softmax, hidden, numbers, histories=()):
        if fatal[place] in numbers.tolist():
            raise RuntimeError("the model's probabilities are not finite")
        return original(self, softmax, hidden, numbers)

    monkeypatch.setattr(Sampler, "__call__", breaks)
    drawings = [{}, {"top_k": 7}, {}, {"temperature": 0}]
    asked = [ask(made, [1, 2], 6, seed=n, drawing=x) for n, x in enumerate(drawings)]
    # Drawn in one go with two of the others.
    failing = ask(made, [1, 2], 6, seed=13, keeps_state=True)
    start().submit([each.text for each in (*asked, failing)])
    for n, (each, drawing) in enumerate(zip(asked, drawings, strict=True)):
        alone = generate(made.model, [1, 2], Sampling(**drawing), length=6, seed=n)
        assert each.tokens == list(alone)
    ended = failing.end()
    assert (ended.reason, ended.state, len(failing.tokens)) == ("failed", None, place)
    assert "the model's probabilities are not finite" in caplog.text


def test_a_token_that_cannot_be_decoded_ends_its_own_text_alone(
    made, start, ask, monkeypatch, caplog
):
    def breaks(token):
        raise Exception("Invalid prefix")

    one, failing = ask(made, [1, 2], 6), ask(made, [1, 2], 6, seed=13)
    monkeypatch.setattr(failing.text._writer, "push", breaks)
    start().submit([one.text, failing.text])
    assert one.tokens == list(generate(made.model, [1, 2], length=6, seed=1))
    assert (failing.end().reason, failing.tokens) == ("failed", [])
    assert "Invalid prefix" in caplog.text
