"""The command that serves a model to others: serve."""

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
    """Serve a model over HTTP in the shape of OpenAI, with sessions that keep their memory.

    A page to try it is at the address that is printed. SIGTERM or Ctrl-C ends it in good order:
    running requests are finished or cut, sessions are saved.

    The server listens on 127.0.0.1, for programs of this machine alone. With --host 0.0.0.0, or an
    address of the machine, whoever reaches the port can use the model, and read and delete every
    session: set an API key then (TXL_API_KEY, which a command line would show to other users of
    the machine), and put a proxy with TLS in front, for this is plain HTTP.
    """

    examples: ClassVar = (
        "txl serve runs/demo --sessions sessions",
        "TXL_API_KEY=... txl serve runs/demo --host 0.0.0.0 --port 80 --sessions sessions",
        "txl serve models/wt103 --weights bfloat16 --max_batch 16",
    )

    dir: Folder
    """A model folder or run folder."""
    weights: Weights = "float32"
    """Precision of the weights: fewer bits are faster; txl eval says what they cost."""
    serving: Annotated[ServeSettings, tyro.conf.OmitArgPrefixes] = field(
        default_factory=ServeSettings
    )

    def run(self) -> None:
        """Serve until a signal comes."""
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
    # A link keeps its own name.
    return Path(os.path.abspath(folder)).name or "transformer-xl"  # noqa: PTH100
