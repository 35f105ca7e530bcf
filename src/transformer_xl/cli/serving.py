"""The command serve."""

import logging
import os
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.cli.given import Folder
from transformer_xl.cli.loading import Weights, load

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
_KEY = "TXL_API_KEY"


@dataclass(kw_only=True)
class Serve:
    """Serve a model over an OpenAI-compatible HTTP API, with sessions that keep their memory.

    The printed address has a page to try it. SIGTERM or Ctrl-C shuts down gracefully: running
    requests are completed or truncated, sessions are saved.

    The server listens on 127.0.0.1, for this machine only. With --host 0.0.0.0, or an address of
    the machine, everyone who reaches the port can use the model, and read and delete all sessions:
    set an API key (in TXL_API_KEY; other users of the machine can see a command line), and put a
    proxy with TLS in front, as the server speaks plain HTTP.
    """

    examples: ClassVar = (
        "txl serve runs/demo --sessions sessions",
        "TXL_API_KEY=... txl serve runs/demo --host 0.0.0.0 --port 80 --sessions sessions",
        "txl serve models/wt103 --weights bfloat16 --max_batch 16",
    )

    dir: Folder
    """A model folder or run folder."""
    weights: Weights = "float32"
    """Precision of the weights: quantized ones are faster; txl eval measures the loss."""
    serving: Annotated[ServeSettings, tyro.conf.OmitArgPrefixes] = field(
        default_factory=ServeSettings
    )

    def run(self) -> None:
        """Serve until a signal arrives."""
        if missing := [name for name in _NEEDED if find_spec(name) is None]:
            raise RuntimeError(
                f"txl serve needs {', '.join(missing)}: pip install 'transformer-xl[serve]'"
            )
        settings = self.serving
        if settings.api_key is None and os.environ.get(_KEY):
            settings = replace(settings, api_key=os.environ[_KEY])
        from transformer_xl.apps.serve.server import serve
        from transformer_xl.config.device import pick_device
        from transformer_xl.config.recipes import generation_of
        from transformer_xl.model.pretrained import find_model_folder, weights_path

        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
        logging.getLogger("transformer_xl.serve").setLevel(logging.INFO)
        generation = generation_of(self.dir)
        model, vocab = load(self.dir, pick_device(), self.weights)
        folder = find_model_folder(self.dir)
        name = settings.name or _name(self.dir)
        serve(model, vocab, weights_path(folder), settings, name, generation)


def _name(folder: Path) -> str:
    # Not resolved: a symbolic link keeps its own name.
    return Path(os.path.abspath(folder)).name or "transformer-xl"  # noqa: PTH100
