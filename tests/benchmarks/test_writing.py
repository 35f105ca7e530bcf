"""What benchmarks/writing.py measures."""

import random
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def writing(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("writing")


def test_repetition_is_counted(writing):
    assert writing.repeated([1, 2, 3, 4, 5, 6]) == 0
    # Five 4-grams, of which one occurred before.
    assert writing.repeated([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert writing.repeated([7] * 10) == pytest.approx(6 / 7)
    assert writing.adjacent_equal([1, 1, 2, 2, 3]) == pytest.approx(2 / 4)


def test_the_longest_repeat_is_the_longest_sequence_that_occurs_twice(writing):
    for seed in range(30):
        numbers = random.Random(seed)
        tokens = [numbers.randrange(3) for _ in range(40)]
        found = [
            n
            for n in range(1, 40)
            for i in range(40 - n)
            for j in range(i + 1, 41 - n)
            if tokens[i : i + n] == tokens[j : j + n]
        ]
        assert writing.longest_repeat(tokens) == max(found, default=0)
    assert writing.longest_repeat([1, 2, 3]) == 0


def test_a_text_parses_up_to_its_last_statement(writing):
    for text, expected in (
        ("def f():\n    return 1\n\n\ndef g(:", True),
        ("class A:\n    x = 1\n\n    def f(self):\n        return (", True),
        ("def f(:\n    return 1\n\n\ndef g():\n    pass\n", False),
        ("x = (1,\n     2,\n)\ny = [", True),
        ("x = (1,\ny = 2\nz = 3\n", False),
        ('def f():\n    """A\n' + "    text\n" * 30, True),
        ('def f():\n    """A\n' + "    text\n" * 50, False),
        ('def f():\n    """A\n' + "    text\n" * 50 + '    """\n    return (', True),
    ):
        assert writing.parses(text) is expected, text


def test_windows_that_the_training_text_has_are_found_at_any_place(writing):
    numbers = random.Random(1)
    training = numbers.randbytes(5000)
    finder = writing.TrainingText(training)
    assert finder.copied([numbers.randbytes(500)]) == 0
    assert finder.copied([training[1234:1334]]) == 1
    piece = numbers.randbytes(100) + training[777 : 777 + 60] + numbers.randbytes(40)
    assert finder.copied([piece]) == pytest.approx(60 / 200)
    # One byte less than a window.
    assert finder.copied([numbers.randbytes(100) + training[:49] + numbers.randbytes(51)]) == 0
