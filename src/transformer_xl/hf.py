"""``import transformer_xl.hf``: registers our classes with transformers; they are in interop/hf."""

from transformer_xl.interop.hf import TransformerXLCache as TransformerXLCache
from transformer_xl.interop.hf import TransformerXLConfig as TransformerXLConfig
from transformer_xl.interop.hf import TransformerXLForCausalLM as TransformerXLForCausalLM
from transformer_xl.interop.hf import (
    TransformerXLForSequenceClassification as TransformerXLForSequenceClassification,
)
from transformer_xl.interop.hf import (
    TransformerXLForTokenClassification as TransformerXLForTokenClassification,
)
from transformer_xl.interop.hf import TransformerXLModel as TransformerXLModel
from transformer_xl.interop.hf import TransformerXLTokenizer as TransformerXLTokenizer


def __getattr__(name: str) -> None:
    """Name what replaces a function of the version before."""
    if name == "save_with_code":
        raise ImportError(
            "save_with_code is gone: model.save_pretrained(FOLDER) writes a folder, for machines "
            "with pip install 'transformer-xl[hf]' and import transformer_xl.hf"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
