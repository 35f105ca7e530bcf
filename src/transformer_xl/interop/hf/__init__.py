"""Models for Hugging Face ``transformers`` 5: a thin wrapper, without computations of its own.

Importing this package registers our model folders with ``AutoConfig``, ``AutoTokenizer``,
``AutoModel``, ``AutoModelForCausalLM``, ``AutoModelForSequenceClassification`` and
``AutoModelForTokenClassification``, for which transformers needs an import.

Needs ``pip install 'transformer-xl[hf]'``.
"""

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        AutoTokenizer,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "transformer_xl.hf needs transformers 5: pip install 'transformer-xl[hf]'"
    ) from error

from transformer_xl.interop.hf.cache import TransformerXLCache
from transformer_xl.interop.hf.configuration import TransformerXLConfig
from transformer_xl.interop.hf.heads import (
    TransformerXLForSequenceClassification,
    TransformerXLForTokenClassification,
    TransformerXLModel,
)
from transformer_xl.interop.hf.modeling import TransformerXLForCausalLM
from transformer_xl.interop.hf.tokenization import TransformerXLTokenizer

__all__ = [
    "TransformerXLCache",
    "TransformerXLConfig",
    "TransformerXLForCausalLM",
    "TransformerXLForSequenceClassification",
    "TransformerXLForTokenClassification",
    "TransformerXLModel",
    "TransformerXLTokenizer",
]

AutoConfig.register(TransformerXLConfig.model_type, TransformerXLConfig, exist_ok=True)
for _auto, _model in (
    (AutoModel, TransformerXLModel),
    (AutoModelForCausalLM, TransformerXLForCausalLM),
    (AutoModelForSequenceClassification, TransformerXLForSequenceClassification),
    (AutoModelForTokenClassification, TransformerXLForTokenClassification),
):
    _auto.register(TransformerXLConfig, _model, exist_ok=True)
AutoTokenizer.register(
    TransformerXLConfig, fast_tokenizer_class=TransformerXLTokenizer, exist_ok=True
)
