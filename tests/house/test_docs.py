"""What the documents say is true: commands parse, links lead somewhere, the tree is drawn whole."""

import ast
import inspect
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import transformer_xl

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^ *```(\{code-cell\}|\w*)[^\n]*\n(.*?)^ *```", re.M | re.S)

CELL = "{code-cell}"
"""The language of a cell of a notebook in Markdown."""


def _documents() -> list[Path]:
    folders = [ROOT / name for name in ("docs", "examples", "benchmarks", "tests")]
    return sorted([*ROOT.glob("*.md"), *(path for f in folders for path in f.rglob("*.md"))])


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _commands(text: str) -> Iterator[str]:
    """Command lines in shell blocks; in a console block, the lines with a prompt; in a cell, !."""
    for language, block in FENCE.findall(text):
        if language not in ("", "sh", "bash", "shell", "console", CELL):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            line = line.strip()
            if language == CELL:
                yield from [line[1:]] if line.startswith("!") else []
            elif line.startswith("$ "):
                yield line[2:].strip()
            elif language != "console":
                yield line


def _arguments(command: str) -> list[str] | None:
    """What a command line hands to `txl`, also behind a pipe; None without it and for synopses."""
    program = r"(?:\S*/)?(?:txl|(?:python3?|torchrun .*?) -m transformer_xl)"
    found = re.match(rf"(?:[^#]*?\s\|\s+)??{program}(?:\s+(.*))?$", command)
    if not found:
        return None
    words = shlex.split(re.split(r"\s(?:\||>|&&|&)", found[1] or "")[0], comments=True)
    is_synopsis = any(re.match(r"[A-Z]{3,}$|\[|…|\.\.\.$", word) for word in words)
    return None if is_synopsis else words


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _anchors(path: Path) -> set[str]:
    return {_slug(line) for line in re.findall(r"^#+ +(.*)$", path.read_text("utf-8"), re.M)}


def _links(text: str) -> Iterator[str]:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    yield from re.findall(r"\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)", text)
    yield from re.findall(r"(?:src|href)=\"([^\"]+)\"", text)


DOCUMENTS = _documents()
COMMANDS = sorted(
    {
        command
        for path in DOCUMENTS
        for command in _commands(path.read_text("utf-8"))
        if _arguments(command) is not None
    }
)


def test_every_command_in_the_documents_parses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformer_xl.cli import parse
    from transformer_xl.config import ModelConfig
    from transformer_xl.config.recipes import recipe_text
    from transformer_xl.model import TransformerXL

    recipe = recipe_text("demo")
    small = ModelConfig(vocab_size=3, n_layer=1, n_head=1, d_model=2, d_inner=2)
    TransformerXL(small).save_pretrained(tmp_path / "small")
    for number, command in enumerate(COMMANDS):
        arguments = _arguments(command)
        assert arguments is not None
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        for word in arguments:
            # The reader has copied it by then.
            if word.endswith(".toml") and "--copy" not in arguments:
                Path(word).parent.mkdir(parents=True, exist_ok=True)
                Path(word).write_text(recipe, encoding="utf-8")
        if arguments[0] == "train" and "/" in arguments[1] and not Path(arguments[1]).exists():
            # And has trained or converted this one.
            shutil.copytree(tmp_path / "small", arguments[1])
        code: object = 0
        try:
            parse(arguments)
        except SystemExit as stop:
            code = stop.code
        # Help and version end the program with 0, and have done what they are for.
        documents = [_name(x) for x in DOCUMENTS if command in [*_commands(x.read_text("utf-8"))]]
        assert not code, f"{documents}: `{command}` does not parse"


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        named = {
            found[1]
            for command in [*_commands(text), *re.findall(r"`(make [^`\n]+)`", text)]
            if (found := re.match(r"make ([a-z-]+)", command))
        }
        assert named <= targets, f"{_name(path)}: no `make {' '.join(named - targets)}`"


def test_python_in_the_documents_uses_names_that_exist() -> None:
    blocks = (
        (path, language, block)
        for path in DOCUMENTS
        for language, block in FENCE.findall(path.read_text("utf-8"))
        if language in ("python", "py", CELL)
    )
    for path, language, block in blocks:
        if language == CELL:
            # Without settings of the cell, commands and magics.
            block = re.sub(r"\A---\n.*?^---\n", "", block, flags=re.M | re.S)
            block = re.sub(r"^[!%].*$", "", block, flags=re.M)
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "transformer_xl":
                used = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "txl":
                used = [node.attr]
            else:
                used = []
            unknown = [name for name in used if name not in transformer_xl.__all__]
            assert not unknown, f"{_name(path)}: transformer_xl has no {unknown}"


def test_every_local_link_leads_somewhere() -> None:
    links = ((path, link) for path in DOCUMENTS for link in _links(path.read_text("utf-8")))
    for path, link in links:
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{_name(path)}: {link} does not exist"
        assert file.is_relative_to(ROOT), f"{_name(path)}: {link} is not part of the project"
        if anchor and file.suffix == ".md":
            assert anchor in _anchors(file), f"{_name(path)}: {link}: no such heading"


def test_the_readme_reads_no_folder_and_no_recipe_that_its_commands_have_not_made() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    made: set[str] = set()
    is_active = False
    for command in _commands(text):
        if command.startswith("make demo"):
            made.add("runs/demo")
        is_active |= command == "source .venv/bin/activate"
        words = command.split()
        if not re.search(r"\btxl |transformer_xl |torchrun|pip ", command):
            continue
        assert is_active, f"`{command}` comes before the environment"
        assert ".venv" not in command
        out = [new for flag, new in pairwise(words) if flag in ("--out", "--copy")]
        out += words[3:4] if words[1] == "convert" else []
        if words[1] == "train" and "--out" not in words:
            # As the command names it.
            out.append(f"runs/{Path(words[2]).stem}")
        read = {x for x in words if re.match(r"(runs|models)/|.*\.toml$", x)} - set(out)
        assert read <= made, f"`{command}` reads {read - made}, which nothing above has made"
        made.update(out)
    assert {"runs/mine", "mine.toml"} <= made


def test_what_the_migration_page_says_is_not_here_is_not_here() -> None:
    from transformer_xl.model import TransformerXL

    text = (ROOT / "docs/migration.md").read_text("utf-8")
    (missing,) = re.findall(r"^Not here: (.*?)\n\n", text, re.M | re.S)
    # What is in brackets takes its place.
    names = re.findall(r"`(\w+)`", re.sub(r"\(`.*\)", "", missing, flags=re.S))
    here = {*inspect.signature(TransformerXL.forward).parameters, *dir(TransformerXL)}
    assert names
    assert not here & set(names)
    assert not re.findall(r"\btxl train|[Bb]eam|Trainer|several streams|Classification", missing)


def test_contributing_names_the_targets_of_make_and_those_that_ci_runs() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    (targets,) = re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert {*re.findall(r"^make ([\w-]+)", text, re.M)} == {*targets.split()} - {"help"}
    ran = re.findall(r"^make ([\w-]+)", (ROOT / ".ci/run").read_text("utf-8"), re.M)
    (named,) = re.findall(r"It runs (.*?)\sin at most", text, re.S)
    assert re.findall(r"`(?:make )?([\w-]+)`", named) == ran


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not in a repository")
def test_what_the_commands_of_the_readme_write_is_ignored_by_git() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    written = ["bach.png", "romeo.state", "sessions/tale"]
    for words in filter(None, map(_arguments, _commands(text))):
        written += [out for option, out in pairwise(words) if option in ("--out", "--copy")]
        written += [f"{words[1]}.txl"] if words[0] == "compress" else []
        written += [words[2]] if words[0] in ("export", "convert") else []
    # Below what may be folders.
    paths = [out if Path(out).suffix else f"{out}/file" for out in written]
    command = ["git", "check-ignore", "--no-index", *paths]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert len(paths) > 8
    assert ignored == paths


def test_the_pages_name_the_packages_in_the_order_of_the_layers() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layers = lint["contracts"][0]["layers"]
    pages = FENCE.findall((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    block = next(text for _, text in pages if text.startswith("cli\n"))
    assert [" ".join(line.split()) for line in block.splitlines()] == layers
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    packages = re.findall(r"^\| `(\w+)` \|", text.split("## The core")[0], re.M)
    # Two packages of a layer stand in either order.
    layer_of = {name: n for n, layer in enumerate(layers) for name in layer.split(" | ")}
    assert {*packages} == {*layer_of}
    assert packages == sorted(packages, key=layer_of.__getitem__)


def test_the_readers_read_what_is_there() -> None:
    text = (
        "```sh\n.venv/bin/txl train demo \\\n  --out runs/x   # resumes\ntxl eval DIR\n"
        "make demo\n```\n"
        "```console\n$ txl doctor --json | tail\ntxl is not a command here\n"
        "$ tail -f x | txl score DIR.md -  # as | txl\n$ ls | tail\n```\n"
        '[a](b.md#c) `[x](y)` ![p](docs/p.png "title") <img src="q.svg">\n'
    )
    found = [words for command in _commands(text) if (words := _arguments(command)) is not None]
    expected = [["train", "demo", "--out", "runs/x"], ["doctor", "--json"]]
    assert found == [*expected, ["score", "DIR.md", "-"]]
    assert list(_links(text)) == ["b.md#c", "docs/p.png", "q.svg"]
    assert _slug("Read these six files, in order") == "read-these-six-files-in-order"
