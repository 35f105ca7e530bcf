"""Transformer-XL: language models with a memory longer than their context.

The public names, listed in ``__init__.pyi``, are loaded when they are first used, so that importing
the package is quick and the command line can answer without torch.
"""

import sys
from types import ModuleType

import lazy_loader

__version__ = "0.1.0"

_load, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = [*_names, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    try:
        return _load(name)
    except AttributeError:
        from transformer_xl.config import near

        if name in __all__ or not (nearest := near(name, __all__)):
            raise
        raise AttributeError(
            f"No {__name__} attribute {name}: did you mean {nearest}?", name=name
        ) from None


class _Package(ModuleType):
    """The package: `train` is a function in it, and no folder.

    Python binds a file to its package under the file's name when anybody imports it. Which of the
    two a caller found would then depend on what was imported before.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
