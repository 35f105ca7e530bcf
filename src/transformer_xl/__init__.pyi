from .config import (
    Config,
    DataConfig,
    EvalConfig,
    GenerateConfig,
    ModelConfig,
    TrainConfig,
    load_recipe,
    shipped_path,
)
from .data import Vocab, load_vocab, prepare
from .errors import CheckpointError, DataError, InputError, SettingsError, TxlError
from .inference.evaluate import (
    Dynamic,
    Result,
    SlidingWindow,
    WithMemory,
    evaluate,
)
from .inference.generate import (
    Sampling,
    Session,
    State,
    from_pretrained,
    generate,
    generate_batch,
)
from .interop.convert import convert
from .interop.export import export
from .model import (
    LanguageModel,
    Memory,
    Positions,
    PositionScheme,
    TransformerXL,
    compact,
    register_model,
)
from .ops import rel_attention
from .train import train

__version__: str

__all__ = [
    "CheckpointError",
    "Config",
    "DataConfig",
    "DataError",
    "Dynamic",
    "EvalConfig",
    "GenerateConfig",
    "InputError",
    "LanguageModel",
    "Memory",
    "ModelConfig",
    "PositionScheme",
    "Positions",
    "Result",
    "Sampling",
    "Session",
    "SettingsError",
    "SlidingWindow",
    "State",
    "TrainConfig",
    "TransformerXL",
    "TxlError",
    "Vocab",
    "WithMemory",
    "__version__",
    "compact",
    "convert",
    "evaluate",
    "export",
    "from_pretrained",
    "generate",
    "generate_batch",
    "load_recipe",
    "load_vocab",
    "prepare",
    "register_model",
    "rel_attention",
    "shipped_path",
    "train",
]
