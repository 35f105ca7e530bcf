"""Models with quantized weights, for inference: decoding is bound by memory bandwidth."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from transformer_xl.errors import InputError
from transformer_xl.model.calling import first_wrapped
from transformer_xl.model.language_model import LanguageModel, SavesItself
from transformer_xl.model.tokens import Embedding, Softmax
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.ops import PACKINGS, PackedWeight, packed_bytes

Weights = Literal["float32", "bfloat16", "int8", "int4"]


class CompactTransformerXL(TransformerXL):
    """A quantized model for inference; it cannot be trained, moved or saved.

    Weights, hidden states and the memory are in bfloat16, or the large matrices in 8 or 4 bits.
    Accumulation, normalization statistics, position angles and the softmax are in float32, as in
    any bfloat16 model.
    """

    def train(self, mode: bool = True) -> "CompactTransformerXL":
        """Set evaluation mode, the only one.

        Raises:
            InputError: ``mode`` is True.
        """
        if mode:
            self.require_trainable()
        return super().train(mode)

    def require_trainable(self) -> None:
        """Raise InputError: the weights are rounded."""
        raise InputError("a compact model cannot learn: use the model it was made from")

    def save_pretrained(self, folder: Path | str, vocab: SavesItself | None = None) -> None:
        """Refuse to save, as the weights are rounded.

        Raises:
            InputError: Always.
        """
        raise InputError(f"a compact model cannot be saved: {_REMEDY}")

    @property
    def nbytes(self) -> int:
        """Size of the weights in memory."""
        packed = packed_bytes([module.weight for module in (*_matrices(self), *_tables(self))])
        return packed + sum(x.nbytes for x in self.parameters())

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> "CompactTransformerXL":
        # to(), float(), cuda() and the like call this.
        raise InputError(f"a compact model stays where and as it is: {_REMEDY}")


_REMEDY = "use the model it was made from, and make it compact again afterwards"


@torch.no_grad()
def compact(model: LanguageModel, weights: Weights) -> LanguageModel:
    """Quantize the weights of a model for inference; ``float32`` returns the model itself.

    Args:
        model: The model, on the device where it will run. It is not modified.
        weights: ``bfloat16``: all weights. ``int8``: the large matrices of the layers and the
            table of the vocabulary, with a scale for each row, and everything else in ``bfloat16``.
            ``int4``: the same, but the matrices of the layers in 4 bits, with a scale for each 32
            numbers. ``txl eval --weights`` measures the loss of accuracy.

    Raises:
        InputError: The model is quantized already, is an LSTM, or has adapters or hooks; or
            ``weights`` is unknown.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> compact(model, "bfloat16").dtype
        torch.bfloat16
    """
    if weights == "float32":
        return model
    if weights not in get_args(Weights):
        known = ", ".join(get_args(Weights))
        raise InputError(f"weights={weights!r} is unknown; choose from {known}")
    if isinstance(model, CompactTransformerXL):
        raise InputError(f"the model is compact already: {_REMEDY}")
    if not isinstance(model, TransformerXL):
        raise InputError(f"a model of kind={model.kind!r} has no compact form: read with float32")
    if (part := first_wrapped(model)) is not None:
        raise InputError(
            f"{part} was wrapped, replaced or hooked: it would be left out of the compact model. "
            "Merge adapters (model.merge_and_unload()) and remove hooks first"
        )
    # Built without allocating or initializing weights.
    with torch.device("meta"):
        rounded_model = CompactTransformerXL(model.config).eval()
    rounded_model.preface = model.preface
    if weights in PACKINGS:
        packed: dict[Tensor, PackedWeight] = {}
        for parts, packing in zip((_matrices, _tables), PACKINGS[weights], strict=True):
            for module, exact in zip(parts(rounded_model), parts(model), strict=True):
                if exact.weight not in packed:
                    packed[exact.weight] = packing.of(exact.weight)
                del module.weight
                module.weight = packed[exact.weight]  # pyright: ignore[reportAttributeAccessIssue]
    # Tied parameters stay tied.
    rounded: dict[Tensor, nn.Parameter] = {}
    for name, module in rounded_model.named_modules():
        for key in [key for key, _ in module.named_parameters(recurse=False)]:
            exact = getattr(model.get_submodule(name), key)
            if exact not in rounded:
                rounded[exact] = nn.Parameter(exact.detach().bfloat16(), requires_grad=False)
            setattr(module, key, rounded[exact])
    return rounded_model


def _matrices(model: TransformerXL) -> list[nn.Linear]:
    return [linear for layer in model.layers for linear in layer.matrices]


def _tables(model: TransformerXL) -> list[Embedding | Softmax]:
    """Return the modules that have a row for each symbol of the vocabulary, of one width."""
    ends = (model.embedding, model.softmax)
    return [x for x in ends if type(x) in (Embedding, Softmax)]  # pyright: ignore[reportReturnType]
