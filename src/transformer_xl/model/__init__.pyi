from .arguments import (
    Text,
    as_tokens,
    require_at_least,
    require_mem_len,
    require_model,
    require_token_inputs,
    shown,
    whole,
)
from .calling import (
    evaluating,
    evaluating_all,
    unwrapped,
)
from .capture import (
    captured,
)
from .decoder import (
    Decoder,
    EagerDecoder,
    choose_step,
)
from .keys_and_values import (
    KeysAndValues,
)
from .language_model import (
    LanguageModel,
    Output,
)
from .layer import (
    DecoderLayer,
    FeedForward,
    RelAttention,
    draw_weights,
)
from .limits import (
    MemoryLimitError,
    any_size,
    full_memory,
    require_bytes,
    require_capacity,
    require_loading,
    require_training,
)
from .loading import (
    build_model,
    builder,
    copy_weights,
    load_model,
    read_model_weights,
    register_model,
    require_own_weights,
    weight_shapes,
)
from .memory import (
    Memory,
    join,
)
from .mixture import (
    MixtureHead,
)
from .observing import (
    observed,
)
from .positions import (
    Positions,
    PositionScheme,
    frequencies,
    relative_positions,
    sinusoids,
)
from .pretrained import (
    CONFIG_FILE,
    add_checksums,
    find_model_folder,
    has_checksum,
    is_preface,
    load_config,
    load_eval_config,
    model_folders,
    model_weights,
    require_storable,
    verified_tensors,
    verify_weights,
    weights_checksum,
    weights_files,
    weights_path,
    write_model,
    write_tensors,
)
from .quantizing import (
    CompactTransformerXL,
    Weights,
    compact,
)
from .reading import (
    Piece,
    Reader,
    ReaderState,
    padded,
    read,
    read_all,
    read_each,
)
from .resizing import (
    resize_vocabulary,
)
from .segment import (
    NO_LIMITS,
    SEGMENT_LEN,
    Lengths,
    Segment,
    View,
)
from .tokens import (
    Embedding,
    Predictor,
    Softmax,
    drawn,
)
from .transformer_xl import (
    TransformerXL,
)
from .variants.adaptive import (
    AdaptiveEmbedding,
    AdaptiveSoftmax,
)
from .variants.gates import (
    GRUGate,
)
from .variants.norms import (
    make_norm,
)
from .variants.positions import (
    ContentAttention,
)

__all__ = [
    "CONFIG_FILE",
    "NO_LIMITS",
    "SEGMENT_LEN",
    "AdaptiveEmbedding",
    "AdaptiveSoftmax",
    "CompactTransformerXL",
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
    "add_checksums",
    "any_size",
    "as_tokens",
    "build_model",
    "builder",
    "captured",
    "choose_step",
    "compact",
    "copy_weights",
    "draw_weights",
    "drawn",
    "evaluating",
    "evaluating_all",
    "find_model_folder",
    "frequencies",
    "full_memory",
    "has_checksum",
    "is_preface",
    "join",
    "load_config",
    "load_eval_config",
    "load_model",
    "make_norm",
    "model_folders",
    "model_weights",
    "observed",
    "padded",
    "read",
    "read_all",
    "read_each",
    "read_model_weights",
    "register_model",
    "relative_positions",
    "require_at_least",
    "require_bytes",
    "require_capacity",
    "require_loading",
    "require_mem_len",
    "require_model",
    "require_own_weights",
    "require_storable",
    "require_token_inputs",
    "require_training",
    "resize_vocabulary",
    "shown",
    "sinusoids",
    "unwrapped",
    "verified_tensors",
    "verify_weights",
    "weight_shapes",
    "weights_checksum",
    "weights_files",
    "weights_path",
    "whole",
    "write_model",
    "write_tensors",
]
