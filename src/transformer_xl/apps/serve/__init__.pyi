from .serve_settings import ServeSettings
from .server import check_place, serve

__all__ = ["ServeSettings", "check_place", "serve"]
