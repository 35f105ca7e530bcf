"""The network: attention, layers, memory, positions, embedding and softmax of the paper."""

from transformer_xl.model.decoder import Decoder
from transformer_xl.model.keys_and_values import KeysAndValues
from transformer_xl.model.language_model import LanguageModel, Output
from transformer_xl.model.layer import DecoderLayer, FeedForward, RelAttention
from transformer_xl.model.loading import build_model, load_model, register_model
from transformer_xl.model.memory import Memory
from transformer_xl.model.positions import Positions, PositionScheme, relative_positions
from transformer_xl.model.tokens import Embedding, Softmax
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.variants.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from transformer_xl.model.variants.gates import GRUGate

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveSoftmax",
    "Decoder",
    "DecoderLayer",
    "Embedding",
    "FeedForward",
    "GRUGate",
    "KeysAndValues",
    "LanguageModel",
    "Memory",
    "Output",
    "PositionScheme",
    "Positions",
    "RelAttention",
    "Softmax",
    "TransformerXL",
    "build_model",
    "load_model",
    "register_model",
    "relative_positions",
]
