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
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from transformer_xl.config.files import replace_file
from transformer_xl.interop.hf.base import TransformerXLPreTrainedModel
from transformer_xl.interop.hf.configuration import TransformerXLConfig
from transformer_xl.interop.hf.heads import (
    TransformerXLForSequenceClassification,
    TransformerXLForTokenClassification,
    TransformerXLModel,
)
from transformer_xl.interop.hf.modeling import TransformerXLForCausalLM
from transformer_xl.interop.hf.tokenization import TransformerXLTokenizer

_PACKAGE = "transformer_xl"
_ENTRY = "modeling_transformer_xl"
_MODELS = {
    "AutoConfig": TransformerXLConfig,
    "AutoModel": TransformerXLModel,
    "AutoModelForCausalLM": TransformerXLForCausalLM,
    "AutoModelForSequenceClassification": TransformerXLForSequenceClassification,
    "AutoModelForTokenClassification": TransformerXLForTokenClassification,
}
# Dependencies of transformers. Others are imported only when they are used.
_AVAILABLE = {"numpy", "safetensors", "tokenizers", "torch", "transformers"}
# Shapes in annotations are checked only in tests: this module replaces jaxtyping.
_SHAPES = "transformer_xl_shapes"
_ANNOTATIONS = '''"""Annotations of arrays, without their shapes."""


class _Array:
    def __class_getitem__(cls, item):
        return item[0]


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Array
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
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for name, source in sources().items():
        replace_file(folder / name, source.encode())
    places = {name: f"{_ENTRY}.{kind.__name__}" for name, kind in _MODELS.items()}
    _add_auto_map(folder / "config.json", places)
    if tokenizer is not None:
        # The first name is that of a tokenizer without a backend: there is none.
        place = [None, f"{_ENTRY}.{TransformerXLTokenizer.__name__}"]
        _add_auto_map(folder / "tokenizer_config.json", {"AutoTokenizer": place})


def _add_auto_map(path: Path, places: dict[str, str] | dict[str, list[str | None]]) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | {"auto_map": places}
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())


def sources() -> dict[str, str]:
    """Return the contents of the files that a model needs, by their names in a model folder."""
    classes = (*_MODELS.values(), TransformerXLTokenizer)
    imports = "".join(f"from {x.__module__} import {x.__name__}\n" for x in classes)
    text = (
        '"""A Transformer-XL for transformers; it imports the other files of this folder."""\n\n'
        f"{imports}\n"
        # When transformers saves the model again, it copies the file of the class's ``__module__``.
        f"for _class in ({', '.join(x.__name__ for x in classes)}):\n"
        "    _class.__module__ = __name__\n"
    )
    entry, waiting = _rewritten(text, _ENTRY)
    found = {f"{_ENTRY}.py": entry, f"{_SHAPES}.py": _ANNOTATIONS}
    while waiting:
        module = waiting.pop()
        name = module.replace(".", "_") + ".py"
        if name not in found:
            text = _path(module).read_text(encoding="utf-8")
            found[name], needed = _rewritten(text, module)
            waiting.extend(needed)
    return found


def _rewritten(text: str, module: str) -> tuple[str, list[str]]:
    """Return a file with relative and deferred imports, and the modules that it needs."""
    lines, needed = text.splitlines(keepends=True), []
    available = _AVAILABLE | sys.stdlib_module_names
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ImportFrom(module=str(source), names=names) if _top(source) == _PACKAGE:
                modules = [alias for alias in names if _is_module(source, alias.name)]
                needed += [f"{source}.{alias.name}" for alias in modules]
                flat, changed = source.replace(".", "_"), []
                if others := [ast.unparse(alias) for alias in names if alias not in modules]:
                    needed.append(source)
                    changed.append(f"from .{flat} import {', '.join(others)}")
                for alias in modules:
                    # transformers detects the files only by statements of this form.
                    changed.append(f"from .{flat}_{alias.name} import __name__ as _")
                    other = alias.asname or alias.name
                    changed.append(f"from . import {flat}_{alias.name} as {other}")
            case ast.ImportFrom(module="jaxtyping"):
                changed = [ast.unparse(node).replace("jaxtyping", f".{_SHAPES}", 1)]
            case ast.Import(names=names) if {_top(x.name) for x in names} - available:
                # transformers refuses a folder if a module of an import statement is missing.
                changed = [f"{x.asname or x.name} = __import__({x.name!r})" for x in names]
            case _:
                continue
        assert node.end_lineno is not None
        start, stop = node.lineno - 1, node.end_lineno
        statements = textwrap.indent("\n".join(changed) + "\n", " " * node.col_offset)
        # The number of entries does not change, so line numbers stay valid.
        lines[start:stop] = [statements] + [""] * (stop - start - 1)
    release = version("transformer-xl")
    origin = f"# From {module} of transformer-xl {release} (Apache-2.0), by save_with_code.\n"
    return origin + "".join(lines), needed


def _top(module: str) -> str:
    return module.split(".")[0]


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
