"""An OpenAI-compatible HTTP server, with sessions that keep their memory between requests.

Its names are imported when they are used: the command line reads the settings without torch and
without the web framework, which comes with ``pip install 'transformer-xl[serve]'``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
