"""Old checkpoints, converted, beside what the implementations that wrote them computed."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from transformer_xl import convert
from transformer_xl.interop.convert.layouts import entries, read_weights
from transformer_xl.model import TransformerXL

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


class Golden:
    """A converted model and the numbers that it has to give.

    Attributes:
        model: Ours, in evaluation mode.
        numbers: Theirs, by name.
    """

    def __init__(self, model: TransformerXL, numbers: Mapping[str, Tensor]) -> None:
        self.model, self.numbers = model, numbers

    def check(self, ours: Tensor, theirs: Tensor | str, what: str = "") -> None:
        """Compare at the tolerance of the precision in which the model computes."""
        expected = self.numbers[theirs] if isinstance(theirs, str) else theirs
        torch.testing.assert_close(
            ours.detach().double(),
            expected.double(),
            rtol=0,
            atol=TOLERANCE[self.model.dtype],
            msg=lambda text: f"{what or theirs}: {text}",
        )

    def beginning(self, prefix: str) -> dict[str, Tensor]:
        """Return the numbers whose names begin like this, without it."""
        return {k.removeprefix(prefix): x for k, x in self.numbers.items() if k.startswith(prefix)}

    def translated(self, theirs: Mapping[str, Tensor], clusters: Any = "reversed") -> dict:
        """Bring parameters, or their gradients, by the authors' names to ours."""
        table = entries(
            self.model.config,
            clusters=clusters,
            biases_in_layers="layers.0.dec_attn.r_w_bias" in theirs,
        )
        shapes = {name: x.shape for name, x in self.model.named_parameters()}
        return read_weights(theirs, table, shapes)

    def check_gradients(self, theirs: Mapping[str, Tensor], clusters: Any = "reversed") -> None:
        """Compare the gradients of all parameters."""
        gradients = self.translated(theirs, clusters)
        ours = dict(self.model.named_parameters())
        assert gradients.keys() == ours.keys()
        for name, gradient in gradients.items():
            self.check(ours[name].grad, gradient, f"gradient of {name}")


@pytest.fixture(scope="session")
def converted(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a converted checkpoint: `converted("pt_01_base/model.pt")`."""

    @cache
    def make(source: str) -> Path:
        return convert(shared / "goldens" / source, tmp_path_factory.mktemp("golden") / "model")

    return make


@pytest.fixture
def golden(shared: Path, converted: Callable[[str], Path]) -> Callable[..., Golden]:
    """Convert a checkpoint: `golden("pt_01_base/model.pt", dtype)`."""

    def make(source: str, dtype: torch.dtype = torch.float64, file: str = "golden.safetensors"):
        source_path = shared / "goldens" / source
        model = TransformerXL.from_pretrained(converted(source)).to(dtype)
        folder = source_path if source_path.is_dir() else source_path.parent
        numbers = load_file(folder / file) if (folder / file).exists() else {}
        return Golden(model, numbers)

    return make
