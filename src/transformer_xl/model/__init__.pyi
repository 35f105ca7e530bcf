from .arguments import Text, as_tokens, require_model, require_token_inputs, shown, whole
from .building import build_model, builder, register_model, weight_shapes
from .calling import evaluating, first_wrapped
from .capture import captured
from .decoder import Decoder, EagerDecoder, choose_step
from .keys_and_values import KeysAndValues
from .language_model import LanguageModel, Output
from .layer import DecoderLayer, FeedForward, RelAttention, draw_weights
from .limits import MemoryLimitError, any_size, least_weights, require_bytes, require_loading
from .memory import Memory
from .mixture import MixtureHead
from .positions import Positions, PositionScheme, frequencies, relative_positions, sinusoids
from .pretrained import ModelFolder, WeightsFiles, load_model, read_tensors, write_tensors
from .quantizing import Weights, compact
from .reading import Piece, Reader, ReaderState, read, read_all
from .segment import NO_LIMITS, SEGMENT_LEN, Lengths, Segment, View
from .tokens import Embedding, Predictor, Softmax
from .transformer_xl import TransformerXL
from .variants.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from .variants.attention_spans import make_spans
from .variants.gates import GRUGate
from .variants.norms import make_norm
from .variants.positions import ContentAttention

__all__ = [
    "NO_LIMITS",
    "SEGMENT_LEN",
    "AdaptiveEmbedding",
    "AdaptiveSoftmax",
    "ContentAttention",
    "Decoder",
    "DecoderLayer",
    "EagerDecoder",
    "Embedding",
    "FeedForward",
    "GRUGate",
    "KeysAndValues",
    "LanguageModel",
    "Lengths",
    "Memory",
    "MemoryLimitError",
    "MixtureHead",
    "ModelFolder",
    "Output",
    "Piece",
    "PositionScheme",
    "Positions",
    "Predictor",
    "Reader",
    "ReaderState",
    "RelAttention",
    "Segment",
    "Softmax",
    "Text",
    "TransformerXL",
    "View",
    "Weights",
    "WeightsFiles",
    "any_size",
    "as_tokens",
    "build_model",
    "builder",
    "captured",
    "choose_step",
    "compact",
    "draw_weights",
    "evaluating",
    "first_wrapped",
    "frequencies",
    "least_weights",
    "load_model",
    "make_norm",
    "make_spans",
    "read",
    "read_all",
    "read_tensors",
    "register_model",
    "relative_positions",
    "require_bytes",
    "require_loading",
    "require_model",
    "require_token_inputs",
    "shown",
    "sinusoids",
    "weight_shapes",
    "whole",
    "write_tensors",
]
