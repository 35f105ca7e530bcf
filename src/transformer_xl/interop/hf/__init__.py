"""Models for Hugging Face ``transformers`` 5: a thin wrapper, without computations of its own.

Importing this package registers our model folders with ``AutoConfig``, ``AutoModelForCausalLM``,
``AutoModelForSequenceClassification`` and ``AutoTokenizer``, for which transformers needs an
import. Needs ``pip install 'transformer-xl[hf]'``.
"""

try:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "transformer_xl.hf needs transformers 5: pip install 'transformer-xl[hf]'"
    ) from error

from transformer_xl.interop.hf.configuration import TransformerXLConfig as TransformerXLConfig
from transformer_xl.interop.hf.inputs import TransformerXLCache as TransformerXLCache
from transformer_xl.interop.hf.modeling import TransformerXLForCausalLM as TransformerXLForCausalLM
from transformer_xl.interop.hf.modeling import (
    TransformerXLForSequenceClassification as TransformerXLForSequenceClassification,
)
from transformer_xl.interop.hf.packaging import save_with_code as save_with_code
from transformer_xl.interop.hf.tokenization import TransformerXLTokenizer as TransformerXLTokenizer

AutoConfig.register(TransformerXLConfig.model_type, TransformerXLConfig, exist_ok=True)
AutoModelForCausalLM.register(TransformerXLConfig, TransformerXLForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(
    TransformerXLConfig, TransformerXLForSequenceClassification, exist_ok=True
)
AutoTokenizer.register(
    TransformerXLConfig, slow_tokenizer_class=TransformerXLTokenizer, exist_ok=True
)
