"""What the programs write that make the texts of the shipped models."""

# ruff: noqa: RUF001 - punctuation of poems

import json
import random
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def program(monkeypatch):
    """Import a program of scripts/pretrained by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "pretrained"))

    def load(name):
        sys.modules.pop(name, None)
        return import_module(name)

    return load


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


def run(program, monkeypatch, name, *words):
    """Run a program as the command line does."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    program(name).main()


def test_the_text_of_poems_is_written_whole_or_not_at_all(program, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "clone" / "全唐诗"
    folder.mkdir(parents=True)

    def lines(seed):
        drawn = "".join(random.Random(seed).sample("白日依山盡黃河入海流欲窮千里目更上一層樓", 20))
        return [f"{drawn[:5]}，{drawn[5:10]}。", f"{drawn[10:15]}，{drawn[15:]}。"]

    poems = [{"title": "登樓", "paragraphs": lines(n)} for n in range(14)]
    poems += [{"title": "其他", "paragraphs": [*lines(14), "甲乙丙丁戊，白日依山盡。"]}]
    (folder / "poet.tang.0.json").write_text(json.dumps(poems))
    of_song = [
        {"title": f"山樓{x}", "paragraphs": [*lines(15), lines(n)[1]]}
        for n, x in enumerate("白日依山盡黃河入海流欲窮千里")
    ]
    of_song += [{"title": "海外", "paragraphs": [*lines(16), "海外有樓山，白日依山盡。"]}]
    of_song += [{"title": "山樓重", "paragraphs": lines(n)} for n in range(14)]
    (folder / "poet.song.0.json").write_text(json.dumps(of_song))
    converter = SimpleNamespace(convert=lambda text: text.replace("樓", "楼"))
    monkeypatch.setitem(sys.modules, "opencc", SimpleNamespace(OpenCC=lambda _: converter))
    out = tmp_path / "out"
    with pytest.raises(SystemExit):
        run(program, monkeypatch, "tang_poems", out, "--poems", tmp_path / "clone")
    assert "nothing for" in capsys.readouterr().err
    assert not out.exists()
    out.mkdir()
    (out / "test.txt").write_text("mine")
    with pytest.raises(SystemExit):
        run(program, monkeypatch, "tang_poems", out, "--poems", tmp_path / "clone")
    assert "test.txt exists; --force overwrites it" in capsys.readouterr().err
    tang_poems = program("tang_poems")
    monkeypatch.setattr(tang_poems, "HELD_OUT_PERCENT", 10)
    words = ["tang_poems", str(out), "--poems", str(tmp_path / "clone"), "--force"]
    monkeypatch.setattr(sys, "argv", words)
    tang_poems.main()
    parts = {part: (out / f"{part}.txt").read_text() for part in ("train", "valid", "test")}
    counts = {part: text.count(tang_poems.POEM_END) for part, text in parts.items()}
    assert counts["valid"] == counts["test"] == 1
    assert "其" not in "".join(parts.values())
    for poem in "".join(parts.values()).split(tang_poems.POEM_END)[:-1]:
        assert tang_poems.is_in_form(poem.partition("\n")[2])
    assert "楼" not in parts["valid"] + parts["test"]
    times = Counter(parts["train"].split(tang_poems.POEM_END)[:-1])
    training = {*times}
    of_tang = {x for x in training if x.startswith("登樓")}
    assert len(of_tang) == 14 - 2
    assert {x for x in training if "楼" in x} == {x.replace("樓", "楼") for x in of_tang}
    # Song poems with a character of their own, with a line of a held-out poem, or that are Tang
    # poems, too, are not read.
    assert "外" not in parts["train"]
    of_song = {x for x in training if x.startswith("山樓")}
    assert len(of_song) == 14 - 2
    assert {times[x] for x in of_song} == {1}
    assert {times[x] for x in training - of_song} == {2}


def test_windows_of_words_are_shared_whatever_their_capitals_line_breaks_and_signs(program):
    overlap = program("overlap")
    words = [f"word{i}" for i in range(50)]
    held_out = np.unique(overlap.windows("A preface. " + " ".join(words)))
    quoted = '"' + ",\n".join(words[10:40]).upper() + '!"'
    assert overlap.shared(quoted, held_out) == 30 - overlap.WINDOW + 1
    assert overlap.shared(" ".join(words[: overlap.WINDOW - 1]), held_out) == 0
    assert overlap.shared(" ".join(reversed(words)), held_out) == 0
    assert overlap.shared("short", held_out) == 0


def test_a_training_text_with_more_than_a_thousandth_of_a_held_out_file_is_refused(
    program, tmp_path, monkeypatch, capsys
):
    training, held_out = tmp_path / "training.txt", tmp_path / "held_out.txt"
    words = [f"word{i}" for i in range(300)]
    training.write_text(" ".join(words[:100]))
    for start, code in ((90, False), (70, True)):
        held_out.write_text(" ".join(words[start:]))
        with pytest.raises(SystemExit) as caught:
            run(program, monkeypatch, "overlap", training, held_out)
        assert caught.value.code == code
    assert "11 of 211 windows" in capsys.readouterr().out


XHTML = """<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops">
<body><section epub:type="chapter"><h2>I</h2><p>“It’s
a <i>fine</i> day—isn’t it?”<a epub:type="noteref" href="#n">1</a></p>
<blockquote><p>First line<br/>
second line</p></blockquote>
<table><tr><td epub:type="z3998:persona">Algernon</td><td>Did you hear?</td></tr></table>
</section></body></html>"""
PACKAGE = """<package xmlns="http://www.idpf.org/2007/opf"><spine><itemref idref="titlepage.xhtml"/>
<itemref idref="chapter-1.xhtml"/></spine></package>"""


@pytest.fixture
def book(tmp_path):
    """Return a work tree of a book with one chapter."""
    folder = tmp_path / "book" / "src" / "epub"
    (folder / "text").mkdir(parents=True)
    (folder / "content.opf").write_text(PACKAGE)
    (folder / "text" / "chapter-1.xhtml").write_text(XHTML, encoding="utf-8")
    return tmp_path / "book"


def test_a_book_is_read_without_notes_with_its_verse_and_speeches(program, book):
    assert [*program("books").chapters(book)] == [
        ["I", "“It’s a fine day—isn’t it?”", "First line\nsecond line", "ALGERNON\tDid you hear?"]
    ]


def test_only_the_lines_of_prose_are_broken(program):
    wrapped = program("books").wrapped
    prose = "  " + " ".join(["word"] * 40)
    assert max(map(len, wrapped(prose, 60).split("\n"))) <= 60
    assert wrapped(prose, 60).split() == prose.split()
    for kept in ("First line\nsecond line", "ALGERNON\tDid you hear?"):
        assert wrapped(kept, 5) == kept


def test_a_book_has_two_forms_one_of_them_as_a_typewriter_writes(program, book):
    english = program("english")
    without_breaks, broken = english.book_forms(book)
    assert [*english.book_forms(book)] == [without_breaks, broken]
    for form in (without_breaks, broken):
        assert form.endswith("\n\n\n")
        assert form.split()[-4:] == ["ALGERNON", "Did", "you", "hear?"]
    assert "fine day--isn't it?" in " ".join(broken.split())
    assert broken.isascii()


def test_articles_in_plain_typography_have_no_unknown_words(program):
    article = (
        " = Robert @-@ Boulter = \n \n"
        " Robert is a 2 @,@ 000 @-@ metre runner . He had a <unk> role . "
        '" It \'s good , " he said . \n'
    )
    assert program("english").plain(article) == (
        'Robert-Boulter\n\nRobert is a 2,000-metre runner. "It\'s good," he said.\n\n\n'
    )


def play(folder, name, *rows):
    """Write an act of a play as Standard Ebooks does: who speaks, and what."""
    text = folder / name / "src" / "epub" / "text"
    text.mkdir(parents=True)
    cells = "".join(f"<tr><td>{who}</td><td>{what}</td></tr>" for who, what in rows)
    namespaces = 'xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops"'
    page = f"<html {namespaces}><body><table>{cells}</table></body></html>"
    (text / "act-1.xhtml").write_text(page, encoding="utf-8")


def test_plays_are_written_in_the_form_of_tiny_shakespeare(program, tmp_path, monkeypatch, capsys):
    shakespeare = program("shakespeare")
    characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ!$&',-.3:;?"
    said = " ".join(f"{a}{b}" for a in "abcdefgh" for b in "xyz")
    tiny = f"First Citizen:\n{characters}\n\nNurse:\n{said}.\n\n"
    tiny += "ROMEO:\nThe last tenth is not read"
    (tmp_path / "input.txt").write_text(tiny)
    plays = tmp_path / "plays"
    direction = '<i epub:type="z3998:stage-direction">Exit.</i>'
    verse = "<p><span>“Ay me”⁠—she’s gone:</span><br/><span>adieu, fiancé!</span></p>"
    play(
        plays,
        "one",
        ("", direction),
        ("Romeo", verse + direction),
        ("", "A row without a name goes on."),
        ("Nurse", "I have heard it (all)."),
        ("Third Lord", "Six pence, 6d."),
        ("Paris<br/>Juliet", "word " * 20),
    )
    play(plays, "two", ("Thief", said.upper()))
    (tmp_path / "listed.txt").write_text("one 1234\ntwo 5678\n")
    monkeypatch.setattr(shakespeare, "LISTED", tmp_path / "listed.txt")
    out, held_out = tmp_path / "out", tmp_path / "held_out.txt"
    held_out.write_text("Nothing.")
    words = [out, "--plays", plays, "--tiny", tmp_path, "--held_out", held_out]
    monkeypatch.setattr(sys, "argv", ["shakespeare", *map(str, words)])
    shakespeare.main()
    assert "1 of 2 left out" in capsys.readouterr().out
    place = len(tiny) * 9 // 10
    assert (out / "valid.txt").read_text() == tiny[place:]
    assert (out / "train.txt").read_text() == tiny[:place] + (
        "\n\nROMEO:\n'Ay me'--she's gone:\nadieu, fiance!\nA row without a name goes on.\n\n"
        "Nurse:\nI have heard it all.\n\n"
        f"PARIS AND JULIET:\n{'word ' * 10}word\n{'word ' * 8}word\n\n"
    )
    with pytest.raises(SystemExit):
        shakespeare.main()
    assert "train.txt exists; --force overwrites it" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--force"])
    text = plays / "two" / "src" / "epub" / "text"
    for move, problem in (
        ((text / "act-1.xhtml", tmp_path / "act"), "two has no speeches"),
        ((text, tmp_path / "text"), "two has no speeches"),
        ((text.parent, tmp_path / "epub"), "two is missing: clone it"),
    ):
        move[0].rename(move[1])
        with pytest.raises(SystemExit):
            shakespeare.main()
        assert problem in capsys.readouterr().err
