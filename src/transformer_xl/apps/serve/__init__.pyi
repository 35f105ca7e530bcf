from .serve_settings import ServeSettings
from .server import alone_in, listen, serve

__all__ = ["ServeSettings", "alone_in", "listen", "serve"]
