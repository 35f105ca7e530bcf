"""x-transformers: a decoder with its T5 bias or rotary positions, and Transformer-XL's memory."""

import torch
from shapes import Job
from torch import Tensor
from x_transformers import Decoder, TransformerWrapper

import peers


class Peer(peers.Peer):
    """Hidden states are remembered; each layer reads those of the layer above it.

    ``t5`` adds a bias for each distance, which its flash attention does not take; ``rotary``
    turns queries and keys, with flash attention.
    """

    def __init__(self, job: Job, variant: str) -> None:
        shape = job.shape
        layers = Decoder(
            dim=shape.d_model,
            depth=shape.n_layer,
            heads=shape.n_head,
            attn_dim_head=shape.d_model // shape.n_head,
            ff_mult=shape.d_inner / shape.d_model,
            ff_dropout=job.dropout,
            rel_pos_bias=variant == "t5",
            rotary_pos_emb=variant == "rotary",
            attn_flash=variant == "rotary",
        )
        self.model = TransformerWrapper(
            num_tokens=shape.vocab,
            max_seq_len=shape.length,
            max_mem_len=shape.mem_len,
            shift_mem_down=1,
            emb_dropout=job.dropout,
            tie_embedding=True,
            attn_layers=layers,
        )
        self.shape = shape
        self.mems = None

    def remember(self) -> None:
        """Fill the memory."""
        if not self.shape.mem_len:
            return
        device = next(self.model.parameters()).device
        self.read(torch.zeros(self.shape.batch, 1, dtype=torch.int64, device=device))
        assert self.mems is not None
        M = self.shape.mem_len
        self.mems = [torch.randn_like(x.expand(-1, M, -1)) for x in self.mems]

    def read(self, tokens: Tensor) -> Tensor:
        """Return the logits of a segment."""
        logits, self.mems = self.model(tokens, mems=self.mems, return_mems=True)
        return logits
