"""The settings of an old model: from the shapes of its tensors and from its settings files.

Names are those of the authors' constructor (``n_token``, ``pre_lnorm``, ``same_length``, ...), and
``layer_norm_epsilon`` as Hugging Face calls it.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from torch import Tensor

from transformer_xl.config import ModelConfig, Quirk
from transformer_xl.config.checks import stored
from transformer_xl.errors import SettingsError

_LARGEST = 1 << 24
_MOST_LAYERS = 1000

Origin = Literal["authors", "nvidia", "huggingface", "tensorflow"]

SETTABLE = (
    *("n_head", "mem_len", "tgt_len", "ext_len", "clamp_len", "same_length", "pre_lnorm"),
    *("cutoffs", "layer_norm_epsilon"),
)
"""Settings that a checkpoint can lack, by the authors' names."""

_AUTHORS: dict[str, int] = {"clamp_len": -1, "same_length": False}
DEFAULTS: dict[Origin, dict[str, int]] = {
    **dict.fromkeys(("authors", "nvidia", "tensorflow"), _AUTHORS),
    "huggingface": {"clamp_len": 1000, "same_length": True},
}
"""The defaults of each implementation."""

# The settings of a checkpoint that are used, by what they must be.
_KINDS = (
    ("a whole number", int, ("n_head", "mem_len", "tgt_len", "ext_len", "clamp_len", "div_val")),
    (
        *("a number", int | float),
        ("dropout", "dropatt", "init_std", "proj_init_std", "layer_norm_epsilon"),
    ),
    ("true or false", bool, ("same_length", "pre_lnorm", "tie_weight", "tie_word_embeddings")),
    ("a list", list | tuple, ("cutoffs", "tie_projs")),
)


def model_config(
    origin: Origin, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> ModelConfig:
    """Return settings with which an old checkpoint has the same results as before."""
    given = {name: value for name, value in settings.items() if value is not None}
    attn_type = _attn_type(tensors)
    tables = _tables(tensors)
    widths = [table.shape[1] for table in tables]
    name = "crit.cluster_weight"
    n_tails = len(_tensor(tensors, name, 2)) if name in tensors else 0
    _require(
        given,
        {
            "mem_len": ("--mem_len NUMBER", True),
            "pre_lnorm": ("--pre_lnorm True or False", origin in ("authors", "nvidia")),
            "cutoffs": (f"--cutoffs with {n_tails} NUMBERS", len(tables) == 1 and n_tails > 0),
            "n_head": ("--n_head NUMBER", attn_type == 2),
        },
    )
    given = DEFAULTS[origin] | given
    n_head, d_head = _heads(tensors, attn_type, given)
    if len(tables) > 1:
        cutoffs = tuple(accumulate(len(table) for table in tables[:-1]))
    else:
        cutoffs = _cutoffs(given.get("cutoffs", ()), n_tails, len(tables[0]))
    d_model = len(_tensor(tensors, "layers.0.dec_attn.layer_norm.weight", 1))
    div_val = _div_val(tensors, widths, d_model, given.get("div_val"))
    mem_len, ext_len = given["mem_len"], given.get("ext_len", 0)
    norm_first = bool(given.get("pre_lnorm"))
    has_all_projections = all(f"word_emb.emb_projs.{i}" in tensors for i in range(len(tables)))
    config = {
        "vocab_size": sum(len(table) for table in tables),
        "n_layer": _n_layer(tensors),
        "n_head": n_head,
        "d_model": d_model,
        "d_head": d_head,
        "d_inner": len(_tensor(tensors, "layers.0.pos_ff.CoreNet.0.weight", 2)),
        "d_embed": widths[0],
        "attn_type": attn_type,
        "n_positions": tensors["r_emb"].shape[1] if "r_emb" in tensors else None,
        "cutoffs": cutoffs,
        "div_val": div_val,
        "mem_len": mem_len,
        "ext_len": ext_len,
        "attn_len": attn_len_of(
            bool(given["same_length"]), mem_len, int(origin in ("tensorflow", "nvidia"))
        ),
        "clamp_len": clamp_len_of(attn_type, given["clamp_len"]),
        "start_memory": "zeros" if origin in ("tensorflow", "huggingface") else "empty",
        "norm_first": norm_first,
        "tie_biases": attn_type == 0 and "r_w_bias" in tensors,
        "tie_embeddings": _ties_embeddings(origin, tensors, given),
        "proj_same_dim": div_val == 1 or has_all_projections,
        "dropout": float(given.get("dropout", 0.0)),
        "attn_dropout": float(given.get("dropatt", 0.0)),
        "init_std": float(given.get("init_std", 0.02)),
        "proj_init_std": float(given.get("proj_init_std", 0.01)),
        "norm_eps": float(
            given.get("layer_norm_epsilon", 1e-12 if origin == "tensorflow" else 1e-5)
        ),
        "quirks": quirks_of(
            origin, attn_type=attn_type, mem_len=mem_len, ext_len=ext_len, norm_first=norm_first
        ),
        "tie_projections": _ties_projections(tensors, len(cutoffs) + 1, given.get("tie_projs", ())),
    }
    facts = {"n_token": config["vocab_size"]}
    names = ("vocab_size", "n_layer", "n_head", "d_head", "d_model", "d_inner", "d_embed")
    facts |= {name: config[name] for name in (*names, "attn_type")}
    for name, fact in facts.items():
        if given.get(name, fact) != fact:
            raise SettingsError(
                f"{name}={given[name]!r}, but the tensors of the checkpoint say {fact}: the "
                "settings belong to another model"
            )
    # Such as shared biases with absolute positions, which have no biases.
    return stored(ModelConfig, config)


def _require(given: Mapping[str, Any], flags: dict[str, tuple[str, bool]]) -> None:
    """Raise one error for all missing settings, or for one of another type."""
    missing = {
        name: flag for name, (flag, is_needed) in flags.items() if is_needed and name not in given
    }
    if missing:
        python = ", ".join(f"{name!r}: ..." for name in missing)
        raise SettingsError(
            f"the checkpoint does not say {', '.join(missing)}, on which the results depend: "
            f"give {' '.join(missing.values())}, in Python settings={{{python}}}, or put it "
            "into a config.json beside the checkpoint"
        )
    for what, kind, names in _KINDS:
        for name in names:
            if (value := given.get(name)) is None:
                continue
            if kind is bool:
                is_right = value in (False, True)
            else:
                is_right = isinstance(value, kind) and not isinstance(value, bool)
            if not is_right:
                raise SettingsError(f"{name}={value!r} must be {what}")
            if kind is int and value > _LARGEST:
                raise SettingsError(f"{name}={value} is more than {_LARGEST:,}: it cannot be right")


def _attn_type(tensors: Mapping[str, Tensor]) -> int:
    for net, attn_type in (("r_net", 0), ("qkv_net", 1), ("q_net", 3 if "r_emb" in tensors else 2)):
        if f"layers.0.dec_attn.{net}.weight" in tensors:
            return attn_type
    raise SettingsError(
        "the checkpoint has no layers.0.dec_attn: it holds no Transformer-XL by any of the names "
        "that are known"
    )


def _tensor(tensors: Mapping[str, Tensor], name: str, ndim: int) -> Tensor:
    if name not in tensors:
        raise SettingsError(f"the checkpoint lacks {name}: it is not complete")
    if tensors[name].ndim != ndim or 0 in tensors[name].shape:
        raise SettingsError(f"{name} cannot have the shape {tuple(tensors[name].shape)}")
    return tensors[name]


def _n_layer(tensors: Mapping[str, Tensor]) -> int:
    n = 0
    while f"layers.{n}.dec_attn.layer_norm.weight" in tensors:
        n += 1
    if n > _MOST_LAYERS:
        raise SettingsError(f"more than {_MOST_LAYERS:,} layers: it cannot be right")
    return n


def _tables(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    tables = []
    while (name := f"word_emb.emb_layers.{len(tables)}.weight") in tensors:
        tables.append(_tensor(tensors, name, 2))
    if not tables:
        raise SettingsError("the checkpoint lacks word_emb.emb_layers.0.weight: it is not complete")
    return tables


def _heads(
    tensors: Mapping[str, Tensor], attn_type: int, given: Mapping[str, Any]
) -> tuple[int, int]:
    if attn_type == 2:
        n_head = given["n_head"]
        width = len(_tensor(tensors, "layers.0.dec_attn.q_net.weight", 2))
        if n_head < 1 or width % n_head:
            raise SettingsError(f"n_head={n_head} must divide the {width} rows of q_net")
        return n_head, width // n_head
    name = "r_w_bias" if "r_w_bias" in tensors else "layers.0.dec_attn.r_w_bias"
    name, ndim = {0: (name, 2), 1: (name, 3), 3: ("r_emb", 4)}[attn_type]
    n_head, d_head = _tensor(tensors, name, ndim).shape[-2:]
    return n_head, d_head


def _cutoffs(given: Sequence[Any], n_tails: int, vocab_size: int) -> tuple[int, ...]:
    """Return the cutoffs of a single table, of which the tensors only determine the number."""
    if not n_tails:
        return ()
    cutoffs = without_ends(given, vocab_size)
    if len(cutoffs) != n_tails or not all(isinstance(x, int) for x in cutoffs):
        raise SettingsError(
            f"cutoffs={list(given)} do not define the {n_tails + 1} clusters of the checkpoint"
        )
    return cutoffs


def without_ends(cutoffs: Sequence[Any], vocab_size: int) -> tuple[Any, ...]:
    """Return cutoffs without 0 and the vocabulary size, which some lists include."""
    return tuple(x for x in cutoffs if x not in (0, vocab_size))


def _div_val(
    tensors: Mapping[str, Tensor], widths: list[int], d_model: int, given: int | None
) -> int:
    if len(widths) == 1:
        # A projection to the same width exists only with div_val > 1, whatever its value.
        is_divided = widths[0] == d_model and "word_emb.emb_projs.0" in tensors
        return max(given or 2, 2) if is_divided else 1
    for div_val in range(2, widths[0] + 1) if given is None else [given]:
        if div_val > 1 and all(w == widths[0] // div_val**i for i, w in enumerate(widths)):
            return div_val
    raise SettingsError(
        f"the widths of the embeddings, {widths}, do not fall by the factor "
        + ("of any div_val" if given is None else f"div_val={given}")
    )


def _ties_embeddings(origin: Origin, tensors: Mapping[str, Tensor], given: Mapping) -> bool:
    # transformers has its own setting for tying.
    name = "tie_word_embeddings" if origin == "huggingface" else "tie_weight"
    copy = tensors.get("crit.out_layers.0.weight")
    if name in given or copy is None:
        return bool(given.get(name, True))
    return _same(copy, tensors["word_emb.emb_layers.0.weight"])


def _ties_projections(
    tensors: Mapping[str, Tensor], n_clusters: int, given: Sequence[Any]
) -> tuple[bool, ...]:
    if not all(isinstance(x, bool | int) for x in given):
        raise SettingsError(f"tie_projs={list(given)} must be a list of true and false")
    is_one = "word_emb.emb_layers.1.weight" not in tensors
    ties = []
    for i in range(n_clusters):
        copy = tensors.get(f"crit.out_projs.{i}")
        owner = tensors.get(f"word_emb.emb_projs.{0 if is_one else i}")
        if owner is None or copy is None:
            ties.append(owner is not None)
        else:
            ties.append(bool(given[i]) if i < len(given) else _same(copy, owner))
    return tuple(ties)


def _same(a: Tensor, b: Tensor) -> bool:
    is_alias = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return a.shape == b.shape and (is_alias or a.equal(b))


def attn_len_of(same_length: bool, mem_len: int, beyond: int) -> int | None:
    """Return how many keys ``same_length`` shows: ``beyond`` more than the memory has.

    The masks of the authors' PyTorch and of Hugging Face hide one more key than those of TensorFlow
    and NVIDIA.

    Raises:
        SettingsError: It shows none.
    """
    if not same_length:
        return None
    if not mem_len + beyond:
        raise SettingsError(
            "same_length with mem_len=0 hides every key in the authors' code: its losses are "
            "NaN. Give --same_length False, or leave it out"
        )
    return mem_len + beyond


def clamp_len_of(attn_type: int, clamp_len: int) -> int | None:
    """Return the largest distance, None if there is no limit."""
    if clamp_len <= 0 or attn_type == 3:
        return None
    # The table of the authors has clamp_len rows: the largest distance is one less.
    return clamp_len - 1 if attn_type == 1 else clamp_len


def quirks_of(
    origin: str, *, attn_type: int, mem_len: int, ext_len: int, norm_first: bool
) -> tuple[Quirk, ...]:
    """Return the deviations from the paper that settings bring about in a program."""
    quirks: dict[Quirk, bool] = {
        "stored_positions": attn_type in (2, 3) and mem_len != 0,
        # Unlike the authors' code, NVIDIA's passes the two lengths in the right order.
        "swapped_ext_len": ext_len != 0 and origin == "authors",
        "raw_queries": attn_type in (2, 3) and norm_first,
        "exact_frequencies": origin == "tensorflow",
    }
    return tuple(quirk for quirk, is_theirs in quirks.items() if is_theirs)
