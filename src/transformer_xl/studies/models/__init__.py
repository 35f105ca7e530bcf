"""Models to compare with: a GPT, an LSTM, and those with the layers of ``transformers``.

:func:`~transformer_xl.model.build_model` finds them by their kind.
"""

from transformer_xl.studies.models.borrowed import (
    Mamba2Model,
    RWKVModel,
    XLNetModel,
    XLSTMModel,
)
from transformer_xl.studies.models.gpt import GPT
from transformer_xl.studies.models.lstm import LSTMModel
from transformer_xl.studies.models.recurrent import RecurrentModel

__all__ = [
    "GPT",
    "LSTMModel",
    "Mamba2Model",
    "RWKVModel",
    "RecurrentModel",
    "XLNetModel",
    "XLSTMModel",
]
