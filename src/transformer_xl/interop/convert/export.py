"""Export of model folders to the formats of the old implementations."""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.data import Vocab
from transformer_xl.errors import InputError
from transformer_xl.interop.convert.layouts import entries, write_weights
from transformer_xl.interop.convert.vocabularies import is_moses, write_hf_vocab

_Say = Callable[[str], None]

_THEIR_NORM_EPS = 1e-5
# Settings that only this package has: of the network, and of its training.
_NETWORK = (
    "kind", "norm", "activation", "gate", "qk_norm", "enhanced_recurrence", "value_residual",
    "layer_attn_lens", "input_recurrence", "embedding_residual",
)  # fmt: skip
_TRAINING = (
    "qkv_dropout", "embed_dropout", "input_dropout", "ff_dropout", "output_dropout",
    "variational_dropout",
)  # fmt: skip


def write_authors(
    config: ModelConfig, weights: Mapping[str, Tensor], folder: Path, say: _Say = lambda text: None
) -> None:
    """Write a state dict for the authors' PyTorch code, and the arguments of its constructor."""
    _require_expressible(config, "the authors' PyTorch code")
    if not config.tie_biases and config.attn_type == 0:
        raise InputError(
            "tie_biases=False: each layer has its own attention biases, and in the authors' "
            "PyTorch code all layers share them; --to huggingface has them per layer"
        )
    theirs = {
        "stored_positions": config.attn_type in (2, 3) and config.mem_len > 0,
        "raw_queries": config.attn_type in (2, 3) and config.norm_first,
        "swapped_ext_len": config.ext_len > 0,
    }
    for quirk, is_theirs in theirs.items():
        if is_theirs and quirk not in config.quirks:
            raise InputError(
                f"attn_type={config.attn_type} with ext_len={config.ext_len} and without the quirk "
                f"{quirk}: the authors' code has it, and would compute something else"
            )
    rows, positions = config.n_positions, config.mem_len + config.ext_len
    if rows is not None and rows <= positions:
        raise InputError(
            f"n_positions={rows}: the tables of the authors' code have more rows than mem_len + "
            f"ext_len = {positions}"
        )
    width = config.n_head * config.head_width
    if config.attn_type == 3 and width != config.d_model:
        raise InputError(
            f"attn_type=3 with n_head x d_head = {width}: in the authors' code it is d_model="
            f"{config.d_model}"
        )
    if config.start_memory == "zeros":
        say("the memory began with zeros that were attended to; the authors' begins empty")
    if config.norm_eps != _THEIR_NORM_EPS:
        say(f"norm_eps={config.norm_eps}: the authors' code has {_THEIR_NORM_EPS}")
    _report_dropped(config, say)
    table = entries(config, clusters="reversed", biases_in_layers=False)
    state = write_weights(weights, table, config)
    torch.save(OrderedDict(state), folder / "state_dict.pt")
    arguments = _arguments(config) | {"n_token": config.vocab_size}
    # Models with attn_type 1 and 3 have a table of tgt_len + ext_len + mem_len rows there.
    arguments["tgt_len"] = 1 if rows is None else rows - positions
    _write_json(folder / "config.json", {"model_kwargs": arguments})


def write_huggingface(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    vocab: Vocab | None,
    settings: Mapping[str, Any],
    folder: Path,
    say: _Say = lambda text: None,
) -> None:
    """Write a folder for ``TransfoXLLMHeadModel`` of transformers up to 4.37."""
    _require_expressible(config, "Hugging Face's code")
    if config.attn_type != 0:
        raise InputError(f"attn_type={config.attn_type}: Hugging Face's code has only attn_type 0")
    if config.ext_len:
        raise InputError(f"ext_len={config.ext_len}: Hugging Face's code has none; set it to 0")
    table = entries(config, clusters="natural", biases_in_layers=True)
    state = {
        name if name.startswith("crit.") else f"transformer.{name}": x
        for name, x in write_weights(weights, table, config).items()
    }
    # With all second names: releases differ in which of them they reconstruct.
    torch.save(state, folder / "pytorch_model.bin")
    content = {
        "architectures": ["TransfoXLLMHeadModel"],
        "model_type": "transfo-xl",
        "vocab_size": config.vocab_size,
        "adaptive": True,
        "untie_r": not config.tie_biases,
        # The setting of transformers for tying; the authors' is tie_weight.
        "tie_word_embeddings": config.tie_embeddings,
        "layer_norm_epsilon": config.norm_eps,
        "init": "normal",
        "init_std": config.init_std,
        "proj_init_std": config.proj_init_std,
        "torch_dtype": str(next(iter(weights.values())).dtype).removeprefix("torch."),
        **_arguments(config),
    }
    theirs = settings.get("tie_projs")
    has_any = any(cluster.has_proj for cluster in config.clusters)
    if not has_any and isinstance(theirs, list) and len(theirs) == len(config.clusters):
        # Without projections it has no effect.
        content["tie_projs"] = theirs
    # Our settings define the network; the others are those of the original checkpoint.
    _write_json(folder / "config.json", {**settings, **content})
    if config.start_memory == "empty":
        say("the memory began empty; Hugging Face's begins with zeros that are attended to")
    _report_dropped(config, say)
    if vocab is not None:
        try:
            write_hf_vocab(vocab, folder)
        except ValueError as error:
            say(f"the vocabulary is left out: {error}")
        else:
            if not is_moses(vocab):
                say(
                    "the vocabulary splits text at spaces and has a symbol for the end of a line; "
                    "TransfoXLTokenizer splits by the Moses rules and reads a line end as a space, "
                    "so it makes other tokens of the same text: give the model token IDs"
                )


def _report_dropped(config: ModelConfig, say: _Say) -> None:
    """Report settings that both implementations lack and that can be dropped."""
    if config.attn_len not in (None, config.mem_len):
        say(
            f"attn_len={config.attn_len}: with same_length their code shows a token mem_len="
            f"{config.mem_len} keys"
        )
    if config.reset_at is not None:
        say(f"reset_at={config.reset_at}: in their code the context does not end at that symbol")
    if config.completion_at is not None:
        say(f"completion_at={config.completion_at}: their code counts prompts as it does the rest")
    if "exact_frequencies" in config.quirks:
        say("quirks=exact_frequencies: their code rounds the frequencies of its sinusoids")
    for name, value, _ in _changed_from_paper(config, _TRAINING):
        say(f"{name}={value}: their code has no such dropout, if training is continued there")
    if config.sample_softmax:
        say(
            f"sample_softmax={config.sample_softmax}: their code uses all words, if training is "
            "continued there"
        )


def _changed_from_paper(config: ModelConfig, names: Sequence[str]) -> list[tuple[str, Any, Any]]:
    """Return settings that differ from the paper's, as names with both values."""
    entries = [(name, getattr(config, name), getattr(ModelConfig(), name)) for name in names]
    return [entry for entry in entries if entry[1] != entry[2]]


def _require_expressible(config: ModelConfig, whose: str) -> None:
    beside = _changed_from_paper(config, (*_NETWORK, "final_norm"))
    for name, value, papers in beside:
        problem = f"{whose} has no other network than that of {name}={papers!r}"
        if name == "final_norm":
            problem = f"{whose} has no normalization after the layers"
        theirs = " ".join(f"--model.{name} {papers}" for name, _, papers in beside)
        raise InputError(f"{name}={value!r}: {problem}; a model for it is trained with {theirs}")
    if "raw_queries" in config.quirks and config.attn_type in (0, 1):
        raise InputError(
            f"attn_type={config.attn_type} with the quirk raw_queries: in {whose} it belongs to "
            "attn_type 2 and 3"
        )
    if config.clamp_len == 0 and config.attn_type in (0, 2):
        raise InputError(f"clamp_len=0: in {whose} it means no limit")
    if config.attn_len is not None and config.mem_len == 0:
        raise InputError(
            f"attn_len={config.attn_len} with mem_len=0: same_length hides every key in {whose}"
        )
    left_out = [i for i, cluster in enumerate(config.clusters) if not cluster.has_proj]
    if config.div_val > 1 and left_out:
        raise InputError(
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
