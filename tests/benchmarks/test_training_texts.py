"""What the programs write that make the texts of the shipped models."""

# ruff: noqa: RUF001 - punctuation of poems

import json
import sys
from importlib import import_module
from pathlib import Path

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
    lines = ["白日依山盡，黃河入海流。", "欲窮千里目，更上一層樓。"]
    poems = [{"title": "登樓", "paragraphs": lines * (n + 2)} for n in range(14)]
    poems += [{"title": "其他", "paragraphs": [*lines, "甲乙丙丁戊，白日依山盡。"]}]
    (folder / "poet.tang.0.json").write_text(json.dumps(poems))
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
