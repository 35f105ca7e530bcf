"""Music: pieces as integers, MIDI files; the task on Bach's chorales."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
