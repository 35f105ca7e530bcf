"""The house rules that can be read off the files. CONTRIBUTING.md has the rest."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

import transformer_xl

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "transformer_xl"
FOLDERS = ("src", "tests", "benchmarks", "scripts", "examples")
LONGEST = 600
SETTINGS = ("__init__", "checks", "data", "evaluation", "model", "training")
DIMENSIONS = "BTMSHKDEFVN"
SECTIONS = ("ModelConfig", "DataConfig", "TrainConfig", "EvalConfig", "GenerateConfig")


def _files() -> list[Path]:
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return sorted(
        path
        for path in found
        if path.is_file() and (path.suffix == ".py" or path.parent.name == "scripts")
    )


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = _files()
PYTHON = [path for path in FILES if path.suffix == ".py"]
SOURCES = [path for path in PYTHON if path.is_relative_to(PACKAGE)]
# The rooms in which names of tensors carry their shape.
SHAPED = [path for path in SOURCES if path.relative_to(PACKAGE).parts[0] in ("ops", "model")]


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that code gives to values: variables, attributes, parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def _bad_suffixes(source: str) -> list[tuple[int, str]]:
    # All capitals is a constant, not a tensor.
    return [
        (line, name)
        for line, name in _names(ast.parse(source))
        if (suffix := re.fullmatch(r".*[a-z].*_([A-Z]+)", name)) and set(suffix[1]) - {*DIMENSIONS}
    ]


def _is_shape(comment: str) -> bool:
    """Whether a comment gives a shape: `(B, T, H)`, `[B, S]` or nothing but dimensions."""
    bracketed = rf"[(\[]\s*[{DIMENSIONS}]\s*,\s*[{DIMENSIONS}0-9][^a-z]*[)\]]"
    bare = rf"[{DIMENSIONS}]([ ,x*]+[{DIMENSIONS}])+(\s*->.*)?"
    return bool(re.search(bracketed, comment) or re.fullmatch(bare, comment.strip()))


def _fields_without_help(source: str) -> list[str]:
    """Settings with no docstring below. A section is described by the docstring of its class."""
    missing = []
    for class_ in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        for field, below in zip(class_.body, [*class_.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or ast.unparse(field.annotation) in SECTIONS:
                continue
            is_helped = (
                isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
                and bool(below.value.value.strip())
            )
            if not is_helped:
                missing.append(f"{class_.name}.{ast.unparse(field.target)}")
    return missing


def test_no_file_is_too_long() -> None:
    lengths = {_name(path): len(path.read_text("utf-8").splitlines()) for path in FILES}
    too_long = {name: lines for name, lines in lengths.items() if lines > LONGEST}
    assert not too_long, f"{too_long}: more than {LONGEST} lines; split each by what it is about"


def test_no_file_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    named = [
        _name(path)
        for path in FILES
        if drawers & {path.stem, *path.relative_to(ROOT).parent.parts[1:]}
    ]
    assert not named, f"{named}: put each function into the lowest room that needs it"


def test_nothing_is_put_off_in_a_comment() -> None:
    found = [
        f"{_name(path)}:{number}: {line.strip()}"
        for path in PYTHON
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(r"\b(TO[D]O|FIX[M]E|X[X]X)\b", line)
    ]
    assert not found, f"{found}: do it, or file an issue"


def test_shape_suffixes_come_from_the_alphabet() -> None:
    texts = {_name(path): path.read_text("utf-8") for path in SHAPED}
    bad = [(name, *found) for name, text in texts.items() for found in _bad_suffixes(text)]
    assert not bad, f"{bad} use letters that are not in {DIMENSIONS}"


def test_shapes_are_in_names_and_signatures_not_in_comments() -> None:
    found = [
        (_name(path), line, text)
        for path in SOURCES
        for line, text in _comments(path)
        if _is_shape(text)
    ]
    assert not found, f"{found}: a comment can lie; put the shape into the name"


def test_every_setting_has_its_help_below() -> None:
    files = [PACKAGE / "config" / f"{name}.py" for name in SETTINGS]
    missing = [field for path in files for field in _fields_without_help(path.read_text("utf-8"))]
    assert not missing, f"{missing} have no docstring, and so no help text"


def test_the_public_names_are_those_that_can_be_imported() -> None:
    names = set(transformer_xl.__all__)
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text("utf-8"))
    imported = (
        x.name for node in stub.body if isinstance(node, ast.ImportFrom) for x in node.names
    )
    assert names == {*imported, "__version__"}
    assert names - {"__version__"} <= set(dir(transformer_xl))
    for name in names:
        value = getattr(transformer_xl, name)
        assert not hasattr(value, "__path__"), f"{name} is a folder, not what is in it"


def test_every_part_of_a_recipe_can_be_made_and_read_by_public_names() -> None:
    parts = {name: getattr(transformer_xl, name)() for name in SECTIONS}
    model, data, train, evaluation, generation = parts.values()
    config = transformer_xl.Config(
        model=model, data=data, train=train, eval=evaluation, generate=generation
    )
    assert transformer_xl.load_recipe("demo") != config
    assert {type(getattr(config, field.name)) for field in fields(config)} == {
        type(part) for part in parts.values()
    }


def test_an_unknown_public_name_is_an_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="attribute TransformerXXL: did you mean Transform"):
        transformer_xl.TransformerXXL  # noqa: B018


def test_a_function_keeps_its_name_when_the_package_is_imported() -> None:
    for package in ("inference.evaluate", "inference.generate", "train"):
        import_module(f"transformer_xl.{package}")
        assert callable(getattr(transformer_xl, package.rpartition(".")[2])), package


def test_all_lists_what_a_file_defines_for_others() -> None:
    for path in SOURCES:
        text = path.read_text("utf-8")
        # Some files can only be imported where an optional package is.
        if "__all__" not in text or path.stem == "__main__":
            continue
        module = import_module(_module_name(path))
        public = getattr(module, "__all__", None)
        if public is None:
            continue
        assert len(public) == len(set(public)), _name(path)
        missing = [name for name in public if not hasattr(module, name)]
        assert not missing, f"{_name(path)}: __all__ names {missing}, which do not exist"
        defined = {
            node.name
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        }
        assert defined <= set(public), f"{_name(path)}: __all__ lacks {defined - set(public)}"


def test_the_rules_find_what_they_forbid() -> None:
    assert _bad_suffixes("score_BHXS = 1") == [(1, "score_BHXS")]
    assert _bad_suffixes("def f(x_BQ): pass") == [(1, "x_BQ")]
    assert not _bad_suffixes("score_BHTS = FORMAT_VERSION + x_T")
    assert all(map(_is_shape, ["(B, T, H, K)", "now [B, S]", "B S D -> B S H D", "B, T"]))
    assert not any(map(_is_shape, ["S = M + T", "For B streams, each with T queries.", "f(B, x)"]))
    two = "class A:\n    x: int\n    '''Help.'''\n    y: int = 3\n    model: ModelConfig\n"
    assert _fields_without_help(two) == ["A.y"]


def test_the_results_of_benchmarks_are_small_tables() -> None:
    results = (path for path in (ROOT / "benchmarks" / "results").rglob("*") if path.is_file())
    # Tables and curves, and no logs: the comparisons of models have up to 80,000 bytes each.
    assert sum(path.stat().st_size for path in results) <= 545_000


def test_the_results_of_benchmarks_name_no_folder_of_a_machine() -> None:
    folder = re.compile(r"""(?<![\w.~-])/(?:home|opt|root|tmp|usr|Users|work)/""")
    results = [x for x in (ROOT / "benchmarks" / "results").rglob("*") if x.is_file()]
    assert results
    assert not [x.name for x in results if folder.search(x.read_text("utf-8"))]
    assert folder.search('"command": "python a.py --json /tmp/a.json"')


def test_actions_of_workflows_are_pinned_to_commits() -> None:
    texts = [path.read_text("utf-8") for path in (ROOT / ".github" / "workflows").iterdir()]
    used = re.findall(r"uses: (.*)", "\n".join(texts))
    assert used
    # A tag can be moved to other code.
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", each) for each in used)
