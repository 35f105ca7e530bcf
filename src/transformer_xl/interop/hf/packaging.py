"""A model folder with its own code, for machines on which this package is not installed.

transformers runs the code in a model folder with ``trust_remote_code=True``. It supports only files
in the folder itself that import each other by relative imports. So the files of this package that a
model needs are written there under their full names, with only their imports changed:
``transformer_xl/model/layer.py`` becomes ``transformer_xl_model_layer.py``.
"""

import ast
import json
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from transformer_xl.config.files import replace_file
from transformer_xl.interop.hf.modeling import TransformerXLPreTrainedModel
from transformer_xl.interop.hf.tokenization import TransformerXLTokenizer

_PACKAGE = "transformer_xl"
_ENTRY = "modeling_transformer_xl"
_CLASSES = {
    "AutoConfig": ("configuration", "TransformerXLConfig"),
    "AutoModelForCausalLM": ("modeling", "TransformerXLForCausalLM"),
    "AutoModelForSequenceClassification": (
        "classification",
        "TransformerXLForSequenceClassification",
    ),
    "AutoTokenizer": ("tokenization", "TransformerXLTokenizer"),
}
# Dependencies of transformers. Others are imported only when they are used.
_AVAILABLE = {
    *sys.stdlib_module_names,
    "numpy",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
}
# Shapes in annotations are checked only in tests: this module replaces jaxtyping.
_SHAPES, _SHAPES_FILE = "jaxtyping", "transformer_xl_shapes"
_ANNOTATIONS = '''"""Annotations of arrays, without their shapes."""


class _Array:
    def __class_getitem__(cls, item):
        return item[0]


'''


def save_with_code(
    folder: Path | str,
    model: TransformerXLPreTrainedModel,
    tokenizer: TransformerXLTokenizer | None = None,
) -> None:
    """Write a model folder that works without this package, with ``trust_remote_code=True``.

    Args:
        folder: The folder; with this package installed, it loads like any other.
        model: The model.
        tokenizer: Its tokenizer.
    """
    folder = Path(folder)
    model.save_pretrained(folder)
    written = [(folder / "config.json", [name for name in _CLASSES if name != "AutoTokenizer"])]
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        written.append((folder / "tokenizer_config.json", ["AutoTokenizer"]))
    for name, source in sources().items():
        replace_file(folder / name, source.encode())
    for path, classes in written:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        places: dict[str, Any] = {name: f"{_ENTRY}.{_CLASSES[name][1]}" for name in classes}
        if "AutoTokenizer" in places:
            # Not the fast tokenizer, whose name is second.
            places = {"AutoTokenizer": [places["AutoTokenizer"], None]}
        content["auto_map"] = places
        replace_file(path, (json.dumps(content, indent=2) + "\n").encode())


def sources() -> dict[str, str]:
    """Return the contents of the files that a model needs, by their names in a model folder."""
    entry = [
        f"from {_PACKAGE}.interop.hf.{place} import {name}" for place, name in _CLASSES.values()
    ]
    listed = ", ".join(name for _, name in _CLASSES.values())
    # When transformers saves the model again, it copies the file of the class's ``__module__``.
    own = f"for _class in ({listed}):\n    _class.__module__ = __name__\n"
    about = (
        '"""A Transformer-XL for transformers; it imports the other files of this folder."""\n\n'
    )
    text = about + "\n".join(entry) + "\n\n" + own
    found = {f"{_ENTRY}.py": _rewritten(text, _ENTRY)}
    waiting, shapes = list(_modules(text)), set[str]()
    while waiting:
        module = waiting.pop()
        if _file_name(module) in found:
            continue
        text = _path(module).read_text(encoding="utf-8")
        found[_file_name(module)] = _rewritten(text, module)
        waiting.extend(_modules(text))
        shapes |= {
            alias.name
            for node in _imports(text)
            if isinstance(node, ast.ImportFrom) and node.module == _SHAPES
            for alias in node.names
        }
    found[f"{_SHAPES_FILE}.py"] = _ANNOTATIONS + "".join(
        f"{name} = _Array\n" for name in sorted(shapes)
    )
    return found


def _imports(text: str) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports of a file, including those inside functions."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def _modules(text: str) -> Iterator[str]:
    """Yield the modules of this package that a file imports."""
    for node in _imports(text):
        if isinstance(node, ast.ImportFrom) and _is_own(node.module):
            module = str(node.module)
            for name in (alias.name for alias in node.names):
                yield f"{module}.{name}" if _is_module(module, name) else module


def _is_own(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == _PACKAGE


def _is_module(module: str, name: str) -> bool:
    """Whether a name that is imported from a module is itself a module."""
    if _path(module).name != "__init__.py":
        return False
    there = getattr(import_module(module), name, None)
    if there is None:
        # Modules that only a GPU needs are not imported yet.
        return find_spec(f"{module}.{name}") is not None
    return isinstance(there, ModuleType)


def _path(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def _file_name(module: str) -> str:
    return module.replace(".", "_") + ".py"


def _rewritten(text: str, module: str) -> str:
    """Return a file with relative imports, and with optional imports deferred."""
    lines = text.splitlines(keepends=True)
    for node in _imports(text):
        assert node.end_lineno is not None
        changed = _changed(node)
        if changed is None:
            continue
        start, stop = node.lineno - 1, node.end_lineno
        changed = textwrap.indent(changed + "\n", " " * node.col_offset)
        # The number of entries does not change, so line numbers stay valid.
        lines[start:stop] = [changed] + [""] * (stop - start - 1)
    release = version("transformer-xl")
    origin = f"# From {module} of transformer-xl {release} (Apache-2.0), by save_with_code.\n"
    return origin + "".join(lines)


def _changed(node: ast.Import | ast.ImportFrom) -> str | None:
    """Return the replacement of an import; None: unchanged."""
    if isinstance(node, ast.ImportFrom):
        module = str(node.module)
        if _is_own(module):
            return "\n".join(_changed_names(module, node.names))
        if module == _SHAPES:
            return ast.unparse(node).replace(_SHAPES, f".{_SHAPES_FILE}", 1)
        return None
    others = [alias for alias in node.names if alias.name.split(".")[0] not in _AVAILABLE]
    if not others:
        return None
    # transformers refuses a folder if a module of an import statement is missing.
    return "; ".join(
        f"{alias.asname or alias.name} = __import__({alias.name!r})" for alias in node.names
    )


def _changed_names(module: str, names: list[ast.alias]) -> Iterator[str]:
    flat = module.replace(".", "_")
    modules = [alias for alias in names if _is_module(module, alias.name)]
    if others := [ast.unparse(alias) for alias in names if alias not in modules]:
        yield f"from .{flat} import {', '.join(others)}"
    for alias in modules:
        # transformers detects the files only by statements of this form.
        yield f"from .{flat}_{alias.name} import __name__ as _"
        yield f"from . import {flat}_{alias.name} as {alias.asname or alias.name}"
