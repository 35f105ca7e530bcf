"""Models to compare with, a GPT and an LSTM.

:func:`~transformer_xl.model.build_model` finds them by their kind.
"""

from transformer_xl.studies.models.gpt import GPT
from transformer_xl.studies.models.lstm import LSTMModel

__all__ = ["GPT", "LSTMModel"]
