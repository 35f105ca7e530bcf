"""What benchmarks/writing.py measures, and what the texts of shipped models hold."""

# ruff: noqa: RUF001 - punctuation of poems

import random
import sys
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


@pytest.fixture
def program(monkeypatch):
    """Import a program of scripts/pretrained by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "pretrained"))

    def load(name):
        sys.modules.pop(name, None)
        return import_module(name)

    return load


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f():\n    return 1\n\n\ndef g(:", True),
        ("class A:\n    x = 1\n\n    def f(self):\n        return (", True),
        ("def f(:\n    return 1\n\n\ndef g():\n    pass\n", False),
        ("x = (1,\n     2,\n)\ny = [", True),
        ("x = (1,\ny = 2\nz = 3\n", False),
        ('def f():\n    """A\n' + "    text\n" * 30, True),
        ('def f():\n    """A\n' + "    text\n" * 50, False),
        ('def f():\n    """A\n' + "    text\n" * 50 + '    """\n    return (', True),
    ],
)
def test_a_text_parses_up_to_its_last_statement(writing, text, expected):
    assert writing.parses(text) is expected


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
    assert found["dry_sequence_breakers"] == ("\n",)
    assert (found["dry_multiplier"], found["top_p"]) == (0.8, 0.9)
    with pytest.raises(ValueError, match="--set length: no setting of sampling"):
        writing.sampling_of(["length=3"])
    with pytest.raises(ValueError, match="dry_base"):
        writing.sampling_of(["dry_base=2.0"])


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


def test_text_that_the_held_out_package_shares_is_left_out(program, tmp_path, monkeypatch):
    python_code = program("python_code")
    body = "\n".join(
        f"def function_{i}(argument_{i}):\n    return argument_{i} + 1" for i in range(20)
    )
    other = body.replace("function", "operation").replace("argument", "value")
    texts = {
        ("networkx", "a.py"): body,
        ("shares", "a.py"): "import os\n" + body[200:600] + "\n" + "x = 1  # of its own\n" * 20,
        ("shares", "b.py"): other,
        ("vendors", "c.py"): "# a copy\n" + other,
    }
    found = {}
    for (package, name), text in texts.items():
        path = tmp_path / package / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        found.setdefault(package, []).append(path)
    packages = [
        python_code.Package(name, "1", "MIT", tuple(files)) for name, files in found.items()
    ]
    monkeypatch.setattr(python_code, "packages", lambda: packages)
    kept = {
        package.name: ([path.name for path, _ in files], overlapping)
        for package, files, overlapping in python_code.select()
    }
    assert kept == {"networkx": (["a.py"], 0), "shares": (["b.py"], 1), "vendors": ([], 0)}


def test_licences_that_are_not_permissive_are_left_out(program):
    python_code = program("python_code")
    taken = {package.name: package.licence for package in python_code.packages()}
    assert {"Python", "numpy", "networkx"} <= taken.keys()
    assert "hypothesis" not in taken  # MPL-2.0
    assert "transformer-xl" not in taken


def test_wikitext_becomes_plain_english(program):
    english = program("english")
    text = (
        " = Title = \n \n It rained , he said ( twice ) . The <unk> was wet . "
        "A well @-@ known city 's 1 @,@ 200 people did n't care ; \" quoted \" . \n"
    )
    assert english.plain(text) == (
        "Title\n\nIt rained, he said (twice). A well-known city's 1,200 people didn't care; "
        '"quoted".\n\n\n'
    )
    two = " = A = \n \n one \n = = B = = \n two \n = C = \n three \n"
    assert [*english.articles(two)] == [two[: two.index(" = C")], " = C = \n three \n"]


def test_poems_have_a_form(program):
    poems = program("tang_poems")
    five = "白日依山盡，黃河入海流。\n欲窮千里目，更上一層樓。"
    assert poems.is_in_form(five)
    assert not poems.is_in_form(five + "\n春。")
    assert not poems.is_in_form("")
