"""Model folders in the layouts of the old implementations, for those who stay with them."""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.convert.layouts import entries, write_weights
from transformer_xl.convert.vocabularies import write_hf_vocab
from transformer_xl.data import Vocab


def write_authors(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    folder: Path,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Write a state dict for the authors' PyTorch code, and the arguments of its constructor.

    Args:
        config: Our settings.
        weights: Our weights.
        folder: An empty folder.
        say: Called with what is lost.

    Raises:
        ValueError: Their model cannot be this one.
    """
    _require_expressible(config, "the authors' PyTorch code")
    if not config.tie_biases and config.attn_type == 0:
        raise ValueError(
            "tie_biases=False: each layer has its own attention biases, and in the authors' "
            "PyTorch code all layers share them; --to huggingface has them per layer"
        )
    missing = {
        "stored_positions": config.attn_type in (2, 3) and config.mem_len > 0,
        "raw_queries": config.attn_type in (2, 3) and config.norm_first,
    }
    for quirk, is_theirs in missing.items():
        if is_theirs and quirk not in config.quirks:
            raise ValueError(
                f"attn_type={config.attn_type} without the quirk {quirk}: the authors' code has "
                "it, and would compute something else with these weights"
            )
    if config.start_memory == "zeros":
        say("the memory began with zeros that were attended to; the authors' begins empty")
    if config.norm_eps != _THEIR_NORM_EPS:
        say(f"norm_eps={config.norm_eps}: the authors' code has {_THEIR_NORM_EPS}")
    _tell_attn_len(config, say)
    table = entries(config, clusters="reversed", biases_in_layers=False)
    state = write_weights(weights, table, config)
    torch.save(OrderedDict(state), folder / "state_dict.pt")
    arguments = _arguments(config) | {"n_token": config.vocab_size}
    # Their models with attn_type 1 and 3 have a table of tgt_len + ext_len + mem_len rows.
    rows = config.n_positions or 0
    arguments["tgt_len"] = max(rows - config.mem_len - config.ext_len, 0) if rows else 1
    _write_json(folder / "config.json", {"model_kwargs": arguments})


def write_huggingface(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    vocab: Vocab | None,
    settings: Mapping[str, Any],
    folder: Path,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Write a folder for ``TransfoXLLMHeadModel`` of transformers up to 4.37.

    Args:
        config: Our settings.
        weights: Our weights.
        vocab: Our vocabulary; None leaves it out.
        settings: What the model's ``config.json`` held when it came from there.
        folder: An empty folder.
        say: Called with what is lost.

    Raises:
        ValueError: Their model cannot be this one.
    """
    _require_expressible(config, "Hugging Face's code")
    if config.attn_type != 0:
        raise ValueError(f"attn_type={config.attn_type}: Hugging Face's code has attn_type 0 alone")
    table = entries(config, clusters="natural", biases_in_layers=True)
    state = {
        name if name.startswith("crit.") else f"transformer.{name}": x
        for name, x in write_weights(weights, table, config).items()
    }
    # A file with all copies: releases differ in which of them they make anew.
    torch.save(state, folder / "pytorch_model.bin")
    made = {
        "architectures": ["TransfoXLLMHeadModel"],
        "model_type": "transfo-xl",
        "vocab_size": config.vocab_size,
        "adaptive": True,
        "untie_r": not config.tie_biases,
        "layer_norm_epsilon": config.norm_eps,
        "init": "normal",
        "init_std": config.init_std,
        "proj_init_std": config.proj_init_std,
        "torch_dtype": str(next(iter(weights.values())).dtype).removeprefix("torch."),
        **_arguments(config),
    }
    origin = {name: value for name, value in settings.items() if name not in _OVERRIDDEN}
    _write_json(folder / "config.json", made | origin)
    if config.start_memory == "empty":
        say("the memory began empty; Hugging Face's begins with zeros that are attended to")
    _tell_attn_len(config, say)
    if vocab is not None:
        try:
            write_hf_vocab(vocab, folder)
        except ValueError as error:
            say(f"the vocabulary is left out: {error}")


# What may have been given by hand when the model was converted.
_OVERRIDDEN = ("n_token", "model_type", "architectures")


_THEIR_NORM_EPS = 1e-5


def _tell_attn_len(config: ModelConfig, say: Callable[[str], None]) -> None:
    if config.attn_len not in (None, config.mem_len):
        say(
            f"attn_len={config.attn_len}: with same_length their code shows a token mem_len="
            f"{config.mem_len} keys"
        )


def _require_expressible(config: ModelConfig, whose: str) -> None:
    if config.final_norm:
        raise ValueError(f"final_norm=True: {whose} has no normalization after the layers")
    left_out = [i for i, cluster in enumerate(config.clusters) if not cluster.has_proj]
    if config.div_val > 1 and left_out:
        raise ValueError(
            f"proj_same_dim=False: cluster {left_out[0]} has no projection, and in {whose} every "
            "cluster has one"
        )


def _arguments(config: ModelConfig) -> dict[str, Any]:
    """Our settings by the authors' names."""
    clamp_len = -1 if config.clamp_len is None else config.clamp_len
    if config.attn_type == 1 and config.clamp_len is not None:
        clamp_len += 1
    clusters = config.clusters
    ties = config.tie_projections
    return {
        **{name: getattr(config, name) for name in ("n_layer", "n_head", "d_model", "d_inner")},
        "d_head": config.head_width,
        "d_embed": config.embed_width,
        "div_val": config.div_val,
        "cutoffs": list(config.cutoffs),
        "tie_weight": config.tie_embeddings,
        "tie_projs": [ties] * len(clusters) if isinstance(ties, bool) else list(ties),
        "pre_lnorm": config.norm_first,
        "attn_type": config.attn_type,
        "mem_len": config.mem_len,
        "ext_len": config.ext_len,
        "same_length": config.attn_len is not None,
        "clamp_len": clamp_len,
        "dropout": config.dropout,
        "dropatt": config.attn_dropout,
        "sample_softmax": -1,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
