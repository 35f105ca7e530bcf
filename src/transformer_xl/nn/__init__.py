"""The network: every module that the paper's model consists of."""

from transformer_xl.nn.adaptive import AdaptiveSoftmax
from transformer_xl.nn.attention import RelAttention
from transformer_xl.nn.embedding import AdaptiveEmbedding, Embedding
from transformer_xl.nn.gate import GRUGate
from transformer_xl.nn.language_model import LanguageModel, build_model, load_model
from transformer_xl.nn.layer import DecoderLayer, FeedForward
from transformer_xl.nn.lstm import LSTMModel
from transformer_xl.nn.memory import Memory
from transformer_xl.nn.model import TransformerXL
from transformer_xl.nn.output import Output
from transformer_xl.nn.positions import Positions, relative_positions
from transformer_xl.nn.softmax import Softmax
from transformer_xl.nn.stepper import Stepper

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveSoftmax",
    "DecoderLayer",
    "Embedding",
    "FeedForward",
    "GRUGate",
    "LSTMModel",
    "LanguageModel",
    "Memory",
    "Output",
    "Positions",
    "RelAttention",
    "Softmax",
    "Stepper",
    "TransformerXL",
    "build_model",
    "load_model",
    "relative_positions",
]
