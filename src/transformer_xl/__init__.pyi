from .config import (
    Config,
    DataConfig,
    EvalConfig,
    GenerateConfig,
    ModelConfig,
    TrainConfig,
)
from .config.recipes import load_recipe
from .config.shipped import shipped_path
from .data.preparing import prepare
from .data.vocab import Vocab
from .data.vocab_files import load_vocab
from .errors import CheckpointError, DataError, InputError, SettingsError, TxlError
from .inference.evaluate import (
    Dynamic,
    Result,
    SlidingWindow,
    WithMemory,
    WithNeighbours,
    evaluate,
)
from .inference.generate import (
    Hypothesis,
    Sampling,
    Searching,
    Session,
    beam_search,
    from_pretrained,
    generate,
    generate_batch,
    load_state,
    save_state,
)
from .interop.convert import convert
from .interop.export import export
from .model.compact import compact
from .model.language_model import LanguageModel
from .model.loading import register_model
from .model.memory import Memory
from .model.positions import Positions, PositionScheme
from .model.transformer_xl import TransformerXL
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
    "Hypothesis",
    "InputError",
    "LanguageModel",
    "Memory",
    "ModelConfig",
    "PositionScheme",
    "Positions",
    "Result",
    "Sampling",
    "Searching",
    "Session",
    "SettingsError",
    "SlidingWindow",
    "TrainConfig",
    "TransformerXL",
    "TxlError",
    "Vocab",
    "WithMemory",
    "WithNeighbours",
    "__version__",
    "beam_search",
    "compact",
    "convert",
    "evaluate",
    "export",
    "from_pretrained",
    "generate",
    "generate_batch",
    "load_recipe",
    "load_state",
    "load_vocab",
    "prepare",
    "register_model",
    "rel_attention",
    "save_state",
    "shipped_path",
    "train",
]
