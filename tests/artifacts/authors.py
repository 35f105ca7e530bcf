"""A model as a file of the authors' PyTorch code holds it: its parts by name; none computes."""

import sys
import types
from typing import Any

import torch
from torch import nn


def authors_model() -> nn.Module:
    """Make a model with the classes, attributes and tensors of the authors' ``model.pt``.

    Two layers, relative attention, an adaptive softmax with one cutoff.
    """
    module = types.ModuleType("mem_transformer")
    sys.modules["mem_transformer"] = module

    def old(name: str) -> nn.Module:
        if not hasattr(module, name):
            setattr(module, name, type(name, (nn.Module,), {"__module__": "mem_transformer"}))
        return getattr(module, name)()

    V, cutoff, D, H, K, F = 30, 12, 14, 2, 7, 18
    torch.manual_seed(4)
    model = old("MemTransformerLM")
    settings = {"n_token": V, "n_layer": 2, "n_head": H, "d_head": K, "d_model": D, "d_embed": D}
    lengths = {"tgt_len": 8, "mem_len": 11, "ext_len": 0, "clamp_len": -1, "attn_type": 0}
    for name, value in (settings | lengths | {"same_length": False}).items():
        setattr(model, name, value)
    model.r_w_bias, model.r_r_bias = (nn.Parameter(torch.randn(H, K) / 3) for _ in range(2))
    embedding = model.word_emb = old("AdaptiveEmbedding")
    embedding.cutoffs, embedding.div_val = [cutoff, V], 2
    tables = [nn.Embedding(cutoff, D), nn.Embedding(V - cutoff, D // 2)]
    embedding.emb_layers = nn.ModuleList(tables)
    sizes = ((D, D), (D, D // 2))
    embedding.emb_projs = nn.ParameterList(nn.Parameter(torch.randn(x) / 3) for x in sizes)
    model.drop = nn.Dropout(0.1)
    model.layers = nn.ModuleList(_layer(old, D, H * K, F) for _ in range(2))
    head = model.crit = old("ProjectedAdaptiveLogSoftmax")
    head.cluster_weight = nn.Parameter(torch.randn(1, D) / 3)
    head.cluster_bias = nn.Parameter(torch.randn(1))
    head.out_layers = nn.ModuleList(
        nn.Linear(width, len(table.weight))
        for width, table in zip((D, D // 2), tables, strict=True)
    )
    for linear, table in zip(head.out_layers, tables, strict=True):
        linear.weight = table.weight
    head.out_projs = nn.ParameterList(nn.Parameter(torch.randn(x) / 3) for x in sizes)
    model.pos_emb = old("PositionalEmbedding")
    model.pos_emb.register_buffer("inv_freq", 1 / (10000 ** (torch.arange(0.0, D, 2.0) / D)))
    return model


def _layer(old: Any, d_model: int, width: int, d_inner: int) -> nn.Module:
    layer = old("RelPartialLearnableDecoderLayer")
    attention = layer.dec_attn = old("RelPartialLearnableMultiHeadAttn")
    attention.pre_lnorm = False
    attention.qkv_net = nn.Linear(d_model, 3 * width, bias=False)
    attention.drop, attention.dropatt = nn.Dropout(0.1), nn.Dropout(0.0)
    attention.o_net = nn.Linear(width, d_model, bias=False)
    attention.layer_norm = nn.LayerNorm(d_model)
    attention.r_net = nn.Linear(d_model, width, bias=False)
    forward = layer.pos_ff = old("PositionwiseFF")
    forward.CoreNet = nn.Sequential(
        nn.Linear(d_model, d_inner),
        nn.ReLU(inplace=True),
        nn.Dropout(0.1),
        nn.Linear(d_inner, d_model),
        nn.Dropout(0.1),
    )
    forward.layer_norm = nn.LayerNorm(d_model)
    return layer
