"""How large the code is, and how its files depend on each other: this revision beside another.

    python benchmarks/architecture.py
    python benchmarks/architecture.py --base c1f4c10 --json found.json

It needs what is installed for development. Rules:

* Lines are those of `src/**/*.py`, blank ones, comments and docstrings included; docstrings are the
  strings that stand alone as a statement, with those below settings and attributes.
* Packages are the folders and files in `src/transformer_xl`. Imports between them are counted once
  for each pair; an import within a function counts like any other, one for type checkers does not.
* A circle is a set of files each of which imports, directly or by way of the others, every other.
* A call of a model is `model(...)`, `model.read(...)`, `model.forward(...)` and the like for the
  names in `MODELS`, `self.model` and so on included. Those in the reader, in the training step
  and in the models themselves are left out: all others pass by them.
* Branches of the main path are the statements `if` and the expressions `x if y else z` in
  `TransformerXL._read` and `DecoderLayer.forward`: there a variant would be asked for.
* Functions with many parameters have more than eight, without `self`, `*args` and `**kwargs`; those
  of Triton's kernels and of relative attention itself, which has ten operands, are left out.
* The core is the model, its attention, memory, positions, embedding, softmax and loss, and the
  training loop: the files in `CORE`, of which each revision has some.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
import networkx
import revision
from result_file import write_result_file

PACKAGE = "transformer_xl"
MODELS = {"model", "_model", "network", "_network", "exact", "transformer"}
CALLS = {"read", "forward"}
ALLOWED = {
    *("model/reading.py", "model/transformer_xl.py", "model/language_model.py", "model/lstm.py"),
    *("train/step.py", "train/runner.py"),
}
MAIN_PATH = {
    "model/transformer_xl.py:TransformerXL._read",
    "model/layer.py:DecoderLayer.forward",
}
CORE = (
    *("model/transformer_xl.py", "model/language_model.py", "model/layer.py", "model/memory.py"),
    *("model/positions.py", "model/tokens.py", "model/segment.py", "model/parts.py"),
    *("ops/products.py", "ops/skew.py", "ops/dropout.py", "ops/nll.py"),
    *("train/loop.py", "train/step.py", "train/runner.py", "train/optim.py"),
    # As earlier revisions have them.
    *("model/embedding.py", "model/softmax.py", "model/lengths.py", "model/linear.py"),
)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", help="count this git revision, too")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    found = {revision.commit(): figures(revision.ROOT / "src")}
    if arguments.base:
        with revision.sources(arguments.base) as source:
            found[revision.commit(arguments.base)] = figures(source)
    print(table(found))
    for name, each in found.items():
        lists = {
            "circles": [", ".join(circle) for circle in each["circles"]],
            "calls of a model that pass by the reader and the training step": each["calls"],
            "functions with more than 8 parameters": each["many_parameters"],
            "the core": [f"{file} {lines}" for file, lines in each["core"].items()],
        }
        for title, lines in lists.items():
            print(f"\n{name}: {title}", *(f"  {line}" for line in lines), sep="\n")
    if arguments.json:
        write_result_file(arguments.json, found)


def figures(source: Path) -> dict[str, Any]:
    """Count what the rules above say, below a folder that holds the package."""
    files = {str(path.relative_to(source / PACKAGE)): path for path in _files(source)}
    texts = {name: path.read_text("utf-8") for name, path in files.items()}
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    functions = [each for name, tree in trees.items() for each in _functions(tree, name)]
    n_docstrings = sum(sum(_docstring_lines(tree)) for tree in trees.values())
    graph = _imports(source)
    return {
        "files": len(files),
        "lines": sum(lines.values()),
        "docstrings": n_docstrings / sum(lines.values()),
        "longest": max(lines.items(), key=lambda each: each[1]),
        **_between_packages(graph),
        "circles": [
            sorted(circle)
            for circle in networkx.strongly_connected_components(graph)
            if len(circle) > 1
        ],
        "branches": sum(
            sum(isinstance(node, ast.If | ast.IfExp) for node in ast.walk(function))
            for name, function in functions
            if name in MAIN_PATH
        ),
        "many_parameters": sorted(
            f"{name} ({n})" for name, function in functions if (n := _n_parameters(function)) > 8
        ),
        "calls": [
            f"{name}:{line}"
            for name, tree in trees.items()
            if name not in ALLOWED
            for line in calls_of_models(tree)
        ],
        "core": {name: lines[name] for name in CORE if name in lines},
    }


def calls_of_models(tree: ast.AST) -> list[int]:
    """Return the lines in which a model is called."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (
            _last_name(node.func) in MODELS
            or (
                isinstance(node.func, ast.Attribute)
                and node.func.attr in CALLS
                and _last_name(node.func.value) in MODELS
            )
        )
    ]


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the figures of each revision as a table in Markdown."""
    rows = {
        "files": lambda x: x["files"],
        "lines": lambda x: f"{x['lines']:,}",
        "docstrings": lambda x: f"{x['docstrings']:.1%}",
        "longest file": lambda x: f"{x['longest'][1]} ({x['longest'][0]})",
        "packages": lambda x: x["packages"],
        "imports between packages": lambda x: x["imports"],
        "circles of files": lambda x: len(x["circles"]),
        "branches of the main path": lambda x: x["branches"],
        "functions with more than 8 parameters": lambda x: len(x["many_parameters"]),
        "calls of a model past the reader": lambda x: len(x["calls"]),
        "files with such calls": lambda x: len({call.split(":")[0] for call in x["calls"]}),
        "lines of the core": lambda x: f"{sum(x['core'].values()):,} in {len(x['core'])} files",
    }
    lines = [["", *found], ["---"] * (len(found) + 1)]
    lines += [[name, *(str(show(each)) for each in found.values())] for name, show in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _functions(
    tree: ast.AST, file: str, within: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions of a file as FILE:CLASS.FUNCTION."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{file}:{within}{node.name}", node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _functions(node, file, f"{within}{node.name}.")


def _n_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the parameters of a function, but for those of kernels and of the operation."""
    if function.name in ("rel_attention", "attention_weights", "attend_step") or any(
        "jit" in ast.unparse(each) for each in function.decorator_list
    ):
        return 0
    arguments = function.args
    names = [x.arg for x in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def _files(source: Path) -> Iterator[Path]:
    return (path for path in sorted((source / PACKAGE).rglob("*.py")))


def _docstring_lines(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if isinstance(node.value.value, str):
            assert node.end_lineno is not None
            yield node.end_lineno - node.lineno + 1


def _imports(source: Path) -> networkx.DiGraph:
    """Return which file imports which, by their names as modules."""
    before = [*sys.path]
    sys.path.insert(0, str(source))
    try:
        built = grimp.build_graph(PACKAGE, exclude_type_checking_imports=True, cache_dir=None)
    finally:
        sys.path[:] = before
    graph = networkx.DiGraph()
    graph.add_nodes_from(built.modules)
    graph.add_edges_from(
        (name, other)
        for name in built.modules
        for other in built.find_modules_directly_imported_by(name)
    )
    return graph


def _between_packages(graph: networkx.DiGraph) -> dict[str, int]:
    def package(module: str) -> str:
        return ".".join(module.split(".")[1:2])

    packages = {package(module) for module in graph} - {"", "__main__"}
    pairs = {(package(a), package(b)) for a, b in graph.edges}
    between = {(a, b) for a, b in pairs if a != b and {a, b} <= packages}
    return {"packages": len(packages), "imports": len(between)}


def _last_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


if __name__ == "__main__":
    main()
