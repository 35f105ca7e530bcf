"""The commands models, convert, export, serve and doctor: what is done with a trained model."""

import logging
import os
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from json import loads
from pathlib import Path
from typing import Annotated, Literal

import tyro

from transformer_xl.apps.serve import ServeSettings
from transformer_xl.cli.given import Folder, LoadsModels, PrintsResult, ReadsModel
from transformer_xl.cli.loading import load, require_model
from transformer_xl.cli.printing import say, show
from transformer_xl.config import ShippedModel, require, require_new


@dataclass(kw_only=True)
class Models(PrintsResult):
    """List the models that come with the package, or show the card of one.

    Whatever takes a model folder takes the name of such a model, without a version or with one, as
    in python-code-2. A model folder or run folder of that name comes first.

    Examples:
      txl models
      txl models python-code
      txl models --json
    """

    name: Annotated[str, tyro.conf.Positional] = ""
    """The model to show, as python-code or python-code-2."""

    def run(self) -> None:
        """Print the list of models, or the card of one."""
        if self.name and not self.json:
            card = ShippedModel.named(self.name).folder / "README.md"
            print(card.read_text(encoding="utf-8"), end="")
        elif self.name:
            show(ShippedModel.named(self.name).about(), as_json=True)
        elif self.json:
            show({model.name: model.about() for model in ShippedModel.newest()}, as_json=True)
        else:
            show({model.name: model.line() for model in ShippedModel.newest()}, as_json=False)


@dataclass(kw_only=True)
class Convert(PrintsResult):
    """Convert an old checkpoint to a model folder.

    SOURCE is a model.pt or state dict of the authors' code, a TensorFlow checkpoint, an NVIDIA
    checkpoint, or a Hugging Face folder. No code in it is executed.

    Examples:
      txl convert LM-TFM-wt103/model.pt models/wt103
      txl convert transfo-xl-wt103 models/wt103
      txl convert tf_wt103/model models/wt103 --mem_len 384 --same_length True
    """

    source: Annotated[Path, tyro.conf.Positional]
    """The checkpoint or folder to convert."""
    folder: Annotated[Path, tyro.conf.Positional]
    """The output: a new folder."""
    vocab: Path | None = None
    """The vocabulary file, if it is not beside the checkpoint."""
    n_head: int | None = None
    """Number of attention heads. This and the next settings: if the checkpoint lacks them."""
    mem_len: int | None = None
    """Memory length."""
    tgt_len: int | None = None
    """Segment length."""
    ext_len: int | None = None
    """Extended context length: tokens before each segment that are read again with it."""
    clamp_len: int | None = None
    """Relative distances above it count as it; 0 or less: no limit."""
    same_length: bool | None = None
    """Whether every token attends to the same number of tokens."""
    pre_lnorm: bool | None = None
    """Whether layer normalization comes before each sublayer (pre-norm) instead of after it."""
    cutoffs: tuple[int, ...] | None = None
    """First token ID of each further cluster of the adaptive softmax."""
    layer_norm_epsilon: float | None = None
    """Epsilon of the layer normalization."""

    def run(self) -> None:
        """Convert."""
        from transformer_xl.interop.convert import SETTABLE, convert

        options = {name: getattr(self, name) for name in SETTABLE}
        settings = {name: x for name, x in options.items() if x is not None}
        folder = convert(self.source, self.folder, settings=settings, vocab=self.vocab, say=say)
        if self.json:
            show(loads((folder / "config.json").read_text(encoding="utf-8")), as_json=True)


@dataclass(kw_only=True)
class Export(LoadsModels, PrintsResult):
    """Export one step of a model to ONNX or torch.export, with the memory as input and output.

    Writes a new folder with the program, a manifest (step.json) with the names and shapes of its
    inputs and outputs, and the vocabulary. The program is compared with the model first.

    Examples:
      txl export runs/demo demo-onnx
      txl export runs/demo demo-onnx --mem_len 256 --tokens 16
      txl export runs/demo demo-torch --format torch
    """

    dir: Folder
    """A model folder, a run folder, or the name of a model (txl models)."""
    out: Annotated[Path, tyro.conf.Positional]
    """A new folder."""
    format: Literal["onnx", "torch"] = "onnx"
    """ONNX (requires the extra onnx), or a torch.export program."""
    mem_len: int | None = None
    """Memory length, fixed in the program; None: as configured in the model."""
    tokens: int = 1
    """Tokens per step, fixed in the program."""

    def run(self) -> None:
        """Export, and print how the program compares with the model."""
        require_new(self.out)
        # Slow imports come after all checks of the arguments.
        from transformer_xl.interop.export import MANIFEST_FILE, export

        folder, difference = export(
            self.dir, self.out, format=self.format, mem_len=self.mem_len, n_tokens=self.tokens
        )
        if difference is None:
            remedy = "which requires pip install 'transformer-xl[onnx]'"
            say(f"wrote {self.out} without comparing it with the model, {remedy}")
        else:
            text = f"its log-probabilities equal the model's up to {difference:.1e}"
            say(f"wrote {self.out}; {text}")
        if self.json:
            show(loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")), as_json=True)


@dataclass(kw_only=True)
class Serve(ReadsModel):
    """Serve a model over an OpenAI-compatible HTTP API, with sessions that keep their memory.

    The printed address has a page to try it. SIGTERM or Ctrl-C shuts down gracefully: running
    requests are completed or truncated, sessions are saved.

    The server listens on 127.0.0.1, for this machine only. With --host 0.0.0.0, or an address of
    the machine, everyone who reaches the port can use the model, and read and delete all sessions:
    set an API key (in TXL_API_KEY; other users of the machine can see a command line), and put a
    proxy with TLS in front, as the server speaks plain HTTP.

    Examples:
      txl serve runs/demo --sessions sessions
      txl serve english
      TXL_API_KEY=... txl serve runs/demo --host 0.0.0.0 --port 80 --sessions sessions
      txl serve models/wt103 --weights bfloat16 --max_batch 16
    """

    serving: Annotated[ServeSettings, tyro.conf.OmitArgPrefixes] = field(
        default_factory=ServeSettings
    )

    def run(self) -> None:
        """Serve until a signal arrives."""
        needed = ("fastapi", "uvicorn", "prometheus_client")
        if missing := [name for name in needed if find_spec(name) is None]:
            raise RuntimeError(
                f"txl serve needs {', '.join(missing)}: pip install 'transformer-xl[serve]'"
            )
        settings = self.serving
        key = os.environ.get("TXL_API_KEY")
        if key is not None and settings.api_key is None:
            # Unset secrets often arrive empty: the server would be open.
            require(bool(key), "TXL_API_KEY is set and empty: give it a value, or unset it")
            settings = replace(settings, api_key=key)
        # Without a folder the server would forget its sessions.
        require(
            "TXL_SESSIONS" not in os.environ or settings.sessions is not None,
            "TXL_SESSIONS is not read any more: give its value as --sessions, or unset it",
        )
        from transformer_xl.apps.serve import require_usable, serve
        from transformer_xl.config import generation_of
        from transformer_xl.model import ModelFolder

        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
        logging.getLogger("transformer_xl.serve").setLevel(logging.INFO)
        generation = generation_of(self.dir)
        # What cannot be used ends the command before the model is loaded.
        require_usable(settings)
        model, vocab = load(self.dir, self.weights)
        if not settings.preface:
            model.preface = ()
        # Not resolved: a symbolic link keeps its own name.
        folder = Path(os.path.abspath(self.dir)).name or "transformer-xl"  # noqa: PTH100
        weights = ModelFolder.find(self.dir).weights.path
        serve(model, vocab, weights, settings, settings.name or folder, generation)


@dataclass(kw_only=True)
class Doctor(LoadsModels, PrintsResult):
    """Show what this machine offers, which implementations it uses and its speed; or verify files.

    For a model folder, run folder, weights file or state file, verifies checksums, shapes, dtypes
    and values; the exit code is 1 if anything is damaged, cannot be read, or was not examined, as
    to load it would take too much.

    Examples:
      txl doctor
      txl doctor runs/demo
      txl doctor python-code
      txl doctor --json
    """

    path: Annotated[str | None, tyro.conf.Positional] = None
    """A folder or a file to verify, or the name of a model."""

    def run(self) -> int:
        """Print the diagnosis."""
        from transformer_xl.apps.doctor import BAD, diagnose, verify

        if self.path is None:
            show(diagnose(), as_json=self.json)
            return 0
        require_model(self.path)
        messages = verify(self.path)
        show(messages, as_json=self.json)
        return int(any(each.startswith(BAD) for each in messages.values()))
