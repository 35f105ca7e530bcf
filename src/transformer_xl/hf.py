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
from transformer_xl.interop.hf import save_with_code as save_with_code
