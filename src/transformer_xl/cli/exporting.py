"""The command export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from transformer_xl.cli.given import Folder
from transformer_xl.cli.printing import say, show
from transformer_xl.config.files import require_new


@dataclass(kw_only=True)
class Export:
    """Export one step of a model to ONNX or torch.export, with the memory as input and output.

    Writes a new folder with the program, a manifest (step.json) with the names and shapes of its
    inputs and outputs, and the vocabulary. The program is compared with the model first.
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
    """ONNX (requires the extra onnx), or a torch.export program."""
    mem_len: int | None = None
    """Memory length, fixed in the program; None: as configured in the model."""
    tokens: int = 1
    """Tokens per step, fixed in the program."""
    json: bool = False
    """Print the manifest as one JSON object, with the largest difference from the model."""

    def run(self) -> None:
        """Export, and print how the program compares with the model."""
        from json import loads

        require_new(self.out)
        # Slow imports come after all checks of the arguments.
        from transformer_xl.interop.export import export
        from transformer_xl.interop.export.writing import EQUAL, MANIFEST_FILE

        folder, errors = export(
            self.dir, self.out, format=self.format, mem_len=self.mem_len, n_tokens=self.tokens
        )
        if errors is None:
            say(
                f"wrote {self.out} without comparing it with the model, which requires "
                "pip install 'transformer-xl[onnx]'"
            )
        else:
            largest = f"{errors.difference:.1e}"
            say(f"wrote {self.out}; its log-probabilities equal the model's up to {largest}")
            if errors.difference > EQUAL:
                say(
                    f"this model amplifies rounding errors: its own are {errors.model:.1e}, the "
                    f"program's {errors.program:.1e}"
                )
        if self.json:
            manifest = loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
            difference = None if errors is None else errors.difference
            show(manifest | {"difference": difference}, as_json=True)
