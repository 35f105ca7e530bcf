"""What fails ends what it concerns, and nothing else."""

import pytest
import torch

from transformer_xl.inference.generate import Sampler, Sampling, generate, random_numbers


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
    original, generator = Sampler.__call__, random_numbers(13)
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
        assert each.tokens == list(
            generate(made.model, [1, 2], Sampling(**drawing), length=6, seed=n)
        )
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
