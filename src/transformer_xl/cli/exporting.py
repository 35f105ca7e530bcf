"""The command that makes a model a program of another kind: export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from transformer_xl.cli.given import Folder
from transformer_xl.cli.printing import say, show
from transformer_xl.config.files import require_new


@dataclass(kw_only=True)
class Export:
    """Write one step of a model for ONNX Runtime or torch.export, with the memory in and out.

    A new folder gets the program, a manifest (step.json) with the names and shapes of what goes in
    and out, and the vocabulary. Before it appears, the program is run against the model.
    """

    examples: ClassVar = (
        "txl export runs/demo demo-onnx",
        "txl export runs/demo demo-onnx --mem_len 256 --tokens 16",
        "txl export runs/demo demo-torch --format torch",
    )

    dir: Folder
    """A model folder or run folder."""
    out: Annotated[Path, tyro.conf.Positional]
    """A new folder."""
    format: Literal["onnx", "torch"] = "onnx"
    """ONNX (needs the extra onnx), or a program of torch.export."""
    mem_len: int | None = None
    """Remembered positions, a fixed number; None: as the model was trained."""
    tokens: int = 1
    """Tokens of each stream that a step reads, a fixed number too."""
    json: bool = False
    """Print the manifest as one JSON object, with the largest differences to the model."""

    def run(self) -> None:
        """Export and say what was checked."""
        from json import loads

        require_new(self.out)
        # What takes a while comes when nothing is left to refuse.
        from transformer_xl.interop.export import export
        from transformer_xl.interop.export.writing import EQUAL, MANIFEST_FILE

        folder, errors = export(
            self.dir, self.out, format=self.format, mem_len=self.mem_len, n_tokens=self.tokens
        )
        if errors is None:
            say(f"{self.out} is written, and was not run: pip install 'transformer-xl[onnx]'")
        else:
            largest = f"{errors.difference:.1e}"
            say(f"{self.out} is written; its log-probabilities are the model's to {largest}")
            if errors.difference > EQUAL:
                say(
                    f"this model magnifies rounding: its own are exact to {errors.model:.1e}, the "
                    f"program's to {errors.program:.1e}"
                )
        if self.json:
            manifest = loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
            difference = None if errors is None else errors.difference
            show(manifest | {"difference": difference}, as_json=True)
