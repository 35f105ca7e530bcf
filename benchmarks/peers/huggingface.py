"""The authors' architecture as Hugging Face published it: transformers 4.37.2."""

import warnings

import torch
import torch.nn.functional as F
from shapes import Job
from torch import Tensor
from transformers import TransfoXLConfig, TransfoXLLMHeadModel, logging

import peers


class Peer(peers.Peer):
    """Hidden states are remembered and projected again for each segment, as its code does."""

    def __init__(self, job: Job, variant: str) -> None:
        shape = job.shape
        names = ("d_model", "n_head", "d_inner", "n_layer", "mem_len")
        config = TransfoXLConfig(
            **{name: getattr(shape, name) for name in names},
            vocab_size=shape.vocab,
            cutoffs=[],
            div_val=1,
            tie_projs=[False],
            d_embed=shape.d_model,
            d_head=shape.d_model // shape.n_head,
            clamp_len=-1,
            same_length=False,
            untie_r=False,
            dropout=job.dropout,
            dropatt=0.0,
        )
        logging.set_verbosity_error()
        with warnings.catch_warnings(action="ignore"):
            self.model = TransfoXLLMHeadModel(config)
        self.shape = shape

    def remember(self) -> None:
        """Fill the memory."""
        mems = self.model.init_mems(self.shape.batch)
        self.mems = None if mems is None else [torch.randn_like(x) for x in mems]

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Read a segment and predict its targets.

        With ``labels`` its code leaves out the last target, and fails in bfloat16 on a processor.
        """
        return F.nll_loss(self.read(tokens).flatten(0, 1).float(), targets.flatten())

    def read(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities of a segment."""
        out = self.model(input_ids=tokens, mems=self.mems)
        self.mems = out.mems
        return out.prediction_scores
