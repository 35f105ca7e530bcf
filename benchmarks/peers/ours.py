"""The model of this project."""

from typing import Any

import torch
from shapes import Job, model_config
from torch import Tensor

import peers
from transformer_xl import Memory, TransformerXL
from transformer_xl.ops import use_backend


class Peer(peers.Peer):
    """Hidden states are remembered in training, keys and values otherwise.

    Single tokens are read by the decoder, which a GPU replays as a graph. The variant is a backend
    of the attention, or ``called``: with these, the model is called for single tokens, too. With
    ``layers`` one layer is compiled for all, as ``train.compile="layers"`` does in training.
    """

    can_be_captured = True

    def __init__(self, job: Job, variant: Any) -> None:
        self.model = TransformerXL(model_config(job.shape, dropout=job.dropout))
        self.job, self.decoder = job, None
        is_single = job.work == "generation" and not job.compiled
        self.is_stepped = variant == "auto" and is_single
        self.has_layers = variant == "layers"
        self.backend: Any = variant if variant not in ("called", "layers") else "auto"
        self.network: Any = None
        self.mems: Any = None

    def reduce_weights(self, job: Job) -> None:
        """Make the model compact, as ``txl generate --weights`` does."""
        from transformer_xl import compact

        weights: Any = job.precision.removesuffix("_weights")
        self.model = compact(self.model, weights)

    def compile(self, job: Job) -> None:
        """Compile the model, or one layer for all."""
        if not self.has_layers or job.work != "training":
            super().compile(job)
            return
        from transformer_xl.config import TrainConfig
        from transformer_xl.config.distributed import World
        from transformer_xl.train.runner import Network

        precision: Any = job.precision
        settings = TrainConfig(compile="layers", precision=precision)
        self.network = Network(self.model, settings, World())

    def remember(self) -> None:
        """Fill the memory."""
        shape, model = self.job.shape, self.model
        size = shape.batch, shape.mem_len, shape.d_model
        states = [
            torch.randn(size, device=model.device, dtype=model.dtype) for _ in range(shape.n_layer)
        ]
        memory = Memory(states)
        self.mems = memory if self.job.work == "training" else model.keep(memory)
        if self.is_stepped:
            import transformer_xl.model as package

            try:
                from transformer_xl.model.segment import Lengths
            except ImportError:
                # Of a revision that had it elsewhere; the decoder had another name there, too.
                from transformer_xl.model.lengths import Lengths
            made = getattr(package, "Decoder", None) or package.Stepper
            self.decoder = made.of(model, Lengths.of(model.config), self.mems)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Read a segment and predict its targets."""
        with use_backend(self.backend):
            if self.network is None:
                out = self.model(tokens, self.mems, targets)
            else:
                lengths = {"mem_len": self.model.config.mem_len, "context": 0}
                options = {"starts": None, **lengths}
                if hasattr(self.network, "running"):
                    with self.network.running(tokens, self.mems, targets, **options) as out:
                        pass
                else:
                    # A revision from before there was that.
                    with self.network.compiles_layers(True):
                        out = self.network(tokens, self.mems, targets, is_compiled=True, **options)
        self.mems = out.mems.clone() if self.is_captured else out.mems
        return out.loss

    def scores(self, tokens: Tensor) -> Tensor:
        """Read a segment and predict what follows."""
        if self.decoder is not None:
            return self.model.softmax.log_probs(self.decoder(tokens[:, 0]))
        with use_backend(self.backend):
            out = self.model(tokens, self.mems)
        self.mems = out.mems
        return out.log_probs[:, -1]
