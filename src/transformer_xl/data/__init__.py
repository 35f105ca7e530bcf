"""Text in, numbers out: vocabularies, corpora on disk, and the streams a model reads."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
