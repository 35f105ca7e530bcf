"""A model with its weights in fewer bits, for reading: one token at a time waits for the memory."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.wrapping import require_plain
from transformer_xl.ops.packed import CompactWeight, Int8Weight, PackedWeight

if TYPE_CHECKING:
    from transformer_xl.model.pretrained import SavesItself

Weights = Literal["float32", "bfloat16", "int8"]


class CompactTransformerXL(TransformerXL):
    """A model that can evaluate and write, but not be trained, moved or saved.

    Weights, hidden states and what the memory holds are in bfloat16. The large matrices of the
    layers are in the order in which they are read fastest, or in int8. Sums in products, the
    statistics of a normalization, angles of positions and the softmax are in float32, as in any
    model in bfloat16.
    """

    def train(self, mode: bool = True) -> "CompactTransformerXL":
        """Set the evaluation mode; there is no other.

        Raises:
            ValueError: Training was asked for.
        """
        if mode:
            raise ValueError(f"a compact model cannot be trained: {_REMEDY}")
        return super().train(mode)

    def save_pretrained(self, folder: Path | str, vocab: "SavesItself | None" = None) -> None:
        """Refuse: digits that were dropped would be missing in the folder.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"a compact model cannot be saved: {_REMEDY}")

    @property
    def nbytes(self) -> int:
        """Size of the weights in memory."""
        matrices = (linear.weight for linear in _matrices(self))
        compact = sum(x.nbytes for x in matrices if isinstance(x, CompactWeight))
        return compact + sum(x.nbytes for x in self.parameters())

    def _apply(self, fn: Any, recurse: bool = True) -> "CompactTransformerXL":
        # What to(), float(), cuda() and the like are made of.
        raise ValueError(f"a compact model stays where and as it is: {_REMEDY}")


_REMEDY = "use the model it was made from, and make it compact again afterwards"


@torch.no_grad()
def compact(model: LanguageModel, weights: Weights) -> LanguageModel:
    """Return a model for reading, with its weights in fewer bits; ``float32`` is the model itself.

    Args:
        model: The model, where it is to be used. It stays as it is.
        weights: ``bfloat16``: all of them, half the size. ``int8``: the large matrices of the
            layers in 8 bits, rounded row by row, and everything else as in ``bfloat16``.
            ``txl eval --weights`` says what it costs in accuracy.

    Raises:
        ValueError: The model is compact already or has adapters or hooks, or there is no such
            precision.
    """
    if weights == "float32":
        return model
    if weights not in ("bfloat16", "int8"):
        raise ValueError(f"weights={weights!r} is unknown; choose from float32, bfloat16, int8")
    if isinstance(model, CompactTransformerXL):
        raise ValueError(f"the model is compact already: {_REMEDY}")
    if not isinstance(model, TransformerXL):
        raise ValueError(f"a model of kind={model.kind!r} has no compact form: read with float32")
    require_plain(model, "it would be left out of the compact model")
    # Made without memory and initialization, then filled.
    with torch.device("meta"):
        made = CompactTransformerXL(model.config).eval()
    for mine, theirs in zip(_matrices(made), _matrices(model), strict=True):
        found = None
        if weights == "int8":
            found = Int8Weight.of(theirs.weight)
        elif PackedWeight.is_possible(model.device) and not _is_cut(mine, made):
            found = PackedWeight(theirs.weight)
        if found is not None:
            del mine.weight
            mine.weight = found  # pyright: ignore[reportAttributeAccessIssue]
    # A parameter of two modules stays one.
    rounded: dict[Tensor, nn.Parameter] = {}
    for name, module in made.named_modules():
        for key in [key for key, _ in module.named_parameters(recurse=False)]:
            exact = getattr(model.get_submodule(name), key)
            if exact not in rounded:
                rounded[exact] = nn.Parameter(exact.detach().bfloat16(), requires_grad=False)
            setattr(module, key, rounded[exact])
    return made


def _is_cut(linear: nn.Linear, model: TransformerXL) -> bool:
    """Whether parts of a matrix are used apart: queries of other states than keys and values."""
    is_qkv = any(linear is layer.attention.qkv_proj for layer in model.layers)
    config = model.config
    return is_qkv and (
        config.attn_type in (2, 3) or config.enhanced_recurrence or "raw_queries" in config.quirks
    )


def _matrices(model: TransformerXL) -> list[nn.Linear]:
    """Return what is read for each token; of the positions only the products are."""
    return [
        linear
        for layer in model.layers
        for linear in (
            layer.attention.qkv_proj,
            layer.attention.o_proj,
            layer.feed_forward.inner,
            layer.feed_forward.outer,
        )
    ]
