"""What benchmarks/writing.py measures."""

import random
from importlib import import_module
from pathlib import Path

import pytest

from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.model import TransformerXL

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


def test_short_pieces_are_measured(writing):
    vocab = train_vocab("bytes", [])
    for piece in ([], [7], [7, 7, 7]):
        found = writing.measure([piece], vocab, [[1]], writing.TrainingText(b"a" * 99), True)
        assert found["mean_length"] == len(piece)
        assert found["repeated_4grams"] == found["copied"] == 0
        assert found["longest_repeat"] == max(len(piece) - 1, 0)


def test_counts_are_not_shown_as_shares(writing):
    assert writing._shown({"longest_repeat": 1.0, "copied": 1.0}) == (
        "longest repeat 1.0, copied 100.0 %"
    )


def test_settings_that_are_off_take_their_defaults(writing):
    found = writing.sampling_of(["dry_multiplier=0.8", "top_p=0.9"])
    assert found["dry_allowed_length"] == 2
    assert (found["dry_multiplier"], found["top_p"]) == (0.8, 0.9)
    with pytest.raises(TypeError, match="length"):
        writing.sampling_of(["length=3"])
    with pytest.raises(ValueError, match="dry_allowed_length"):
        writing.sampling_of(["dry_allowed_length=3"])


def test_texts_that_are_carried_are_penalized_as_one(writing, tiny_config):
    model = TransformerXL(tiny_config).eval()
    prompts, settings = [[1, 2], [3], [4, 5]], {"temperature": 0, "repetition_penalty": 1e9}
    seen = [*prompts[0]]
    for prompt, piece in zip(
        prompts, writing.write(model, prompts, 5, settings, carried=True), strict=True
    ):
        seen += prompt
        assert not {*piece} & {*seen}
        assert len({*piece}) == 5
        seen += piece


def test_prompts_for_python_begin_with_a_definition(writing):
    text = "\n\n".join(f"def f{i}():\n    '''import this'''\n    return {i}" for i in range(50))
    for place in writing.places(text, 10, is_python=True):
        assert text[place:].startswith("def f")
    # No definition after the last place.
    assert writing.places("def f\n" + "#\n" * 99, 4, is_python=True) == [0] * 4
    with pytest.raises(ValueError, match="no line of the text begins with def"):
        writing.places("x = 1\n", 4, is_python=True)
