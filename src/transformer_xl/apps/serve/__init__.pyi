from .serve_settings import ServeSettings
from .server import require_usable, serve

__all__ = ["ServeSettings", "require_usable", "serve"]
