"""The mapping between our weights and the tensors of the old implementations.

All of them descend from the authors' PyTorch model and share its names; other names are translated
to these when a checkpoint is opened (:mod:`transformer_xl.interop.convert.old_checkpoints`).

    =============================  =========================================================
    theirs                         ours
    =============================  =========================================================
    word_emb.emb_layers.i.weight   embedding.weight, or embedding.weights.i with div_val > 1
    word_emb.emb_projs.i           embedding.proj.weight, or embedding.projs.i.weight
    layers.l.dec_attn.qkv_net      layers.l.attention.qkv_proj
    layers.l.dec_attn.q_net        its first third (attn_type 2 and 3)
    layers.l.dec_attn.kv_net       the rest of it
    layers.l.dec_attn.r_net        layers.l.attention.r_proj
    layers.l.dec_attn.o_net        layers.l.attention.o_proj
    layers.l.dec_attn.layer_norm   layers.l.attention_norm
    layers.l.pos_ff.CoreNet.0, 3   layers.l.feed_forward.inner, outer
    layers.l.pos_ff.layer_norm     layers.l.feed_forward_norm
    r_w_bias, r_r_bias             content_bias, position_bias
    r_emb, r_bias                  distance_embedding or position_embedding, distance_bias;
                                   theirs has the nearest position last, ours first
    crit.out_layers.i              softmax.weight, softmax.weights.i; softmax.bias in one piece
    crit.out_projs.i               softmax.proj.weight, or softmax.projs.i.weight
    crit.cluster_weight, _bias     softmax.cluster_weight, _bias; the authors' in reverse
    =============================  =========================================================
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.errors import InputError

INV_FREQ = "pos_emb.inv_freq"
"""The frequencies of the sinusoids: a buffer that is saved with the weights."""


class Entry(NamedTuple):
    """A tensor of an old checkpoint, and the tensor or part of a tensor of ours that it is."""

    theirs: str
    ours: str
    part: int | slice = slice(None)
    """The part of ours."""
    flip: int | None = None
    """The dimension whose order is reversed."""
    shape: tuple[int, ...] | None = None
    """Their shape, if it differs from that of our part."""
    is_copy: bool = False
    """Whether it is an optional second name of a tensor that has another entry."""


def entries(
    config: ModelConfig, *, clusters: Literal["natural", "reversed"], biases_in_layers: bool
) -> list[Entry]:
    """List the tensors of a checkpoint, in the order in which the authors' model has them."""
    table = [] if biases_in_layers and not config.tie_biases else _biases(config)
    names = _embedding_names(config)
    table += [Entry(f"word_emb.emb_layers.{i}.weight", x) for i, (x, _) in enumerate(names)]
    table += [Entry(f"word_emb.emb_projs.{i}", x) for i, (_, x) in enumerate(names) if x]
    for n in range(config.n_layer):
        table += _layer(config, n, biases_in_layers)
    return table + _softmax(config, clusters)


def _biases(config: ModelConfig) -> list[Entry]:
    index = 0 if config.tie_biases else slice(None)
    N, H, K = config.n_layer, config.n_head, config.head_width
    match config.attn_type:
        case 0:
            both = (("r_w_bias", "content_bias"), ("r_r_bias", "position_bias"))
            return [Entry(theirs, ours, index) for theirs, ours in both]
        case 1:
            return [
                Entry("r_emb", "distance_embedding", flip=1),
                Entry("r_w_bias", "content_bias", shape=(N, H, K)),
                Entry("r_bias", "distance_bias", flip=1),
            ]
        case 3:
            shape = (N, config.n_positions or 0, H, K)
            return [Entry("r_emb", "position_embedding", flip=1, shape=shape)]
    return []


def _embedding_names(config: ModelConfig) -> list[tuple[str, str]]:
    """Our names of each table and its projection; empty if there is none."""
    clusters = config.clusters
    if config.div_val == 1:
        return [("embedding.weight", "embedding.proj.weight" * clusters[0].has_proj)]
    return [
        (f"embedding.weights.{i}", f"embedding.projs.{i}.weight" * cluster.has_proj)
        for i, cluster in enumerate(clusters)
    ]


def _layer(config: ModelConfig, n: int, biases_in_layers: bool) -> list[Entry]:
    theirs, ours = f"layers.{n}.dec_attn", f"layers.{n}.attention"
    table = []
    if biases_in_layers:
        n_bias = 0 if config.tie_biases else n
        for name, bias in (("r_r_bias", "position_bias"), ("r_w_bias", "content_bias")):
            table.append(Entry(f"{theirs}.{name}", bias, n_bias, is_copy=config.tie_biases))
    if config.attn_type in (0, 1):
        parts = {"qkv_net": slice(None)}
    else:
        width = config.n_head * config.head_width
        parts = {"q_net": slice(width), "kv_net": slice(width, None)}
    for name, part in parts.items():
        table.append(Entry(f"{theirs}.{name}.weight", f"{ours}.qkv_proj.weight", part))
    table.append(Entry(f"{theirs}.o_net.weight", f"{ours}.o_proj.weight"))
    table += _pair(f"{theirs}.layer_norm", f"layers.{n}.attention_norm")
    if config.attn_type == 0:
        table.append(Entry(f"{theirs}.r_net.weight", f"{ours}.r_proj.weight"))
    theirs, ours = f"layers.{n}.pos_ff", f"layers.{n}.feed_forward"
    for name, suffix in (("CoreNet.0", ".inner"), ("CoreNet.3", ".outer"), ("layer_norm", "_norm")):
        table += _pair(f"{theirs}.{name}", f"{ours}{suffix}")
    return table


def _pair(theirs: str, ours: str) -> list[Entry]:
    return [Entry(f"{theirs}.{name}", f"{ours}.{name}") for name in ("weight", "bias")]


def _softmax(config: ModelConfig, order: Literal["natural", "reversed"]) -> list[Entry]:
    table, clusters = [], config.clusters
    embedding = _embedding_names(config)
    is_one = config.div_val == 1
    if len(clusters) > 1:
        flip = 0 if order == "reversed" else None
        for name in ("cluster_weight", "cluster_bias"):
            table.append(Entry(f"crit.{name}", f"softmax.{name}", flip=flip))
    for i, (tied, _) in enumerate(embedding):
        untied = "softmax.weight" if is_one else f"softmax.weights.{i}"
        ours = tied if config.tie_embeddings else untied
        theirs = f"crit.out_layers.{i}"
        table.append(Entry(f"{theirs}.weight", ours, is_copy=config.tie_embeddings))
        rows = slice(None) if is_one else slice(clusters[i].start, clusters[i].stop)
        table.append(Entry(f"{theirs}.bias", "softmax.bias", rows))
    for i, cluster in enumerate(clusters):
        if cluster.has_proj:
            is_only = is_one and len(clusters) == 1
            untied = "softmax.proj.weight" if is_only else f"softmax.projs.{i}.weight"
            ours = embedding[0 if is_one else i][1] if cluster.ties_proj else untied
            table.append(Entry(f"crit.out_projs.{i}", ours, is_copy=cluster.ties_proj))
    return table


def read_weights(
    theirs: Mapping[str, Tensor], table: list[Entry], shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """Translate a checkpoint into our weights; whole tensors are not copied."""
    known = {entry.theirs for entry in table} | {INV_FREQ}
    missing = [x.theirs for x in table if not x.is_copy and x.theirs not in theirs]
    if missing:
        raise InputError(f"the checkpoint lacks {_listed(missing)}: it is not complete")
    if surplus := sorted(theirs.keys() - known):
        raise InputError(
            f"the checkpoint holds {_listed(surplus)}, which a model with these settings does not "
            "have: the settings belong to another model"
        )
    weights: dict[str, Tensor] = {}
    for entry in table:
        if entry.theirs not in theirs:
            continue
        own, shape = theirs[entry.theirs], shapes[entry.ours]
        part = torch.empty(shape, device="meta")[entry.part]
        if tuple(own.shape) != (entry.shape or tuple(part.shape)):
            raise InputError(
                f"{entry.theirs} has the shape {tuple(own.shape)}, and the settings say "
                f"{entry.shape or tuple(part.shape)}: they belong to another model"
            )
        own = own if entry.flip is None else own.flip(entry.flip)
        own = own.reshape(part.shape)
        if entry.is_copy:
            ours = weights[entry.ours][entry.part]
            is_same = ours.data_ptr() == own.data_ptr() and ours.stride() == own.stride()
            # Bit by bit, so that NaN equals itself.
            bits = [x.contiguous().view(torch.uint8) for x in (ours, own)]
            if not is_same and (ours.dtype != own.dtype or not torch.equal(*bits)):
                raise InputError(
                    f"{entry.theirs} is not the same as {entry.ours}, with which the settings tie "
                    "it: they belong to another model"
                )
        elif part.shape == shape:
            weights[entry.ours] = own
        else:
            if entry.ours not in weights:
                weights[entry.ours] = own.new_empty(shape)
            weights[entry.ours][entry.part] = own
    return weights


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
