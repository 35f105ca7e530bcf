"""Sphinx: the directive of the playground, and the scripts with its models, of those shipped."""

import base64
import gzip
import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from docutils import nodes
from safetensors.torch import load_file, save
from sphinx.util.docutils import SphinxDirective
from torch import Tensor

from transformer_xl.config.files import replace_file
from transformer_xl.config.shipped import ShippedModel

MODELS = ("shakespeare", "tang-poems")
HTML = '<div class="playground"></div>'


class Playground(SphinxDirective):
    """The place of the playground in a page."""

    def run(self) -> list[nodes.Node]:
        """Return the element that the script fills."""
        return [nodes.raw("", HTML, format="html")]


def add_scripts(app: Any, _page: str, _template: str, context: dict[str, Any], _tree: Any) -> None:
    """Add the scripts to a page that has a playground."""
    if HTML in context.get("body", ""):
        for name in ("token_view", "playground"):
            app.add_css_file(f"playground/{name}.css")
        for name in ("token_view", "transformer_xl", "playground"):
            app.add_js_file(f"playground/{name}.js", loading_method="defer")


def rounded(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in float32, matrices in 8 bits, with a scale for each row beside them."""
    for name, weight in weights.items():
        if weight.ndim != 2:
            yield name, weight.float()
        else:
            scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
            yield name, (weight / scale).round().to(torch.int8)
            yield f"{name}.scale", scale


def script_of(folder: Path, name: str) -> str:
    """Return a script with a model: a page that is opened from a file cannot read other files."""
    model = {
        x: json.loads((folder / f"{x}.json").read_text("utf-8")) for x in ("config", "tokenizer")
    }
    packed = gzip.compress(save(dict(rounded(load_file(folder / "model.safetensors")))), mtime=0)
    model["weights"] = base64.b64encode(packed).decode()
    content = json.dumps(model, ensure_ascii=False, separators=(",", ":"))
    return f"(TransformerXL.models ??= {{}})[{json.dumps(name)}] = {content};\n"


def write_models(app: Any, _: Exception | None) -> None:
    """Write the scripts with the models, and what the server's page shares, beside its own."""
    folder = Path(app.outdir) / "_static" / "playground"
    if not folder.is_dir():
        return
    shared = files("transformer_xl.apps.serve")
    for name in ("token_view.css", "token_view.js"):
        replace_file(folder / name, (shared / name).read_bytes())
    newest = {model.name: model for model in ShippedModel.newest()}
    for name in MODELS:
        replace_file(folder / f"{name}.js", script_of(newest[name].folder, name).encode())


def setup(app: Any) -> dict[str, bool]:
    """Connect the extension."""
    app.add_directive("playground", Playground)
    app.connect("html-page-context", add_scripts)
    app.connect("build-finished", write_models)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
