"""Transformer-XL: language models with a memory longer than their context.

The public names are loaded when they are first used, so that importing the package is quick and
the command line can answer without torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer_xl.config import (
        Config,
        DataConfig,
        EvalConfig,
        GenerateConfig,
        ModelConfig,
        TrainConfig,
    )
    from transformer_xl.config.recipes import load_recipe
    from transformer_xl.data.preparing import prepare
    from transformer_xl.data.vocab import Vocab
    from transformer_xl.data.vocab_files import load_vocab
    from transformer_xl.inference.evaluate import Result, evaluate
    from transformer_xl.inference.generate import (
        Session,
        generate,
        generate_batch,
        load_state,
        save_state,
    )
    from transformer_xl.interop.convert import convert
    from transformer_xl.interop.export import export
    from transformer_xl.model.compact import compact
    from transformer_xl.model.language_model import LanguageModel
    from transformer_xl.model.memory import Memory
    from transformer_xl.model.transformer_xl import TransformerXL
    from transformer_xl.ops import rel_attention
    from transformer_xl.train import train

__version__ = "0.1.0"

__all__ = [
    "Config",
    "DataConfig",
    "EvalConfig",
    "GenerateConfig",
    "LanguageModel",
    "Memory",
    "ModelConfig",
    "Result",
    "Session",
    "TrainConfig",
    "TransformerXL",
    "Vocab",
    "__version__",
    "compact",
    "convert",
    "evaluate",
    "export",
    "generate",
    "generate_batch",
    "load_recipe",
    "load_state",
    "load_vocab",
    "prepare",
    "rel_attention",
    "save_state",
    "train",
]

_HOME = {
    "Config": "config",
    "DataConfig": "config",
    "EvalConfig": "config",
    "GenerateConfig": "config",
    "LanguageModel": "model.language_model",
    "Memory": "model.memory",
    "ModelConfig": "config",
    "Result": "inference.evaluate",
    "Session": "inference.generate",
    "TrainConfig": "config",
    "TransformerXL": "model.transformer_xl",
    "Vocab": "data.vocab",
    "compact": "model.compact",
    "convert": "interop.convert",
    "evaluate": "inference.evaluate",
    "export": "interop.export",
    "generate": "inference.generate",
    "generate_batch": "inference.generate",
    "load_recipe": "config.recipes",
    "load_state": "inference.generate",
    "load_vocab": "data.vocab_files",
    "prepare": "data.preparing",
    "rel_attention": "ops",
    "save_state": "inference.generate",
    "train": "train",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The package: `train` is a function in it, and no folder.

    Python binds a file to its package under the file's name when anybody imports it. Which of the
    two a caller found would then depend on what was imported before.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
