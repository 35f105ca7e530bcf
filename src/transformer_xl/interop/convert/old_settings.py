"""The settings of an old model: read from its shapes and from what came with it.

Names are those of the authors' constructor (``n_token``, ``pre_lnorm``, ``same_length``, ...), and
``layer_norm_epsilon`` as Hugging Face calls it.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Literal

from torch import Tensor

from transformer_xl.config import ModelConfig, Quirk
from transformer_xl.config.unused import unused_in_model, without_unused

_LARGEST = 1 << 24
_MOST_LAYERS = 1000

Origin = Literal["authors", "nvidia", "huggingface", "tensorflow"]


SETTABLE = (
    "n_head",
    "mem_len",
    "tgt_len",
    "ext_len",
    "clamp_len",
    "same_length",
    "pre_lnorm",
    "cutoffs",
    "layer_norm_epsilon",
)
"""What a checkpoint may not say of itself, by the authors' names."""


_AUTHORS: dict[str, int] = {"clamp_len": -1, "same_length": False}
DEFAULTS: dict[Origin, dict[str, int]] = {
    "authors": _AUTHORS,
    "nvidia": _AUTHORS,
    "tensorflow": _AUTHORS,
    "huggingface": {"clamp_len": 1000, "same_length": True},
}
"""What each implementation takes for a setting that nobody gave."""


def model_config(
    origin: Origin, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> ModelConfig:
    """Make our settings for an old checkpoint, so that it computes what it did.

    Args:
        origin: Whose implementation wrote it.
        tensors: Its tensors, by the authors' names.
        settings: Its settings, by the authors' names.

    Raises:
        ValueError: A setting is missing, is of a wrong kind, or contradicts the tensors.
    """
    found = _Found(settings)
    attn_type = _attn_type(tensors)
    tables = _tables(tensors)
    n_tails = _rows(tensors, "crit.cluster_weight") if "crit.cluster_weight" in tensors else 0
    has_cutoffs = len(tables) > 1 or not n_tails
    found.require(
        {
            "mem_len": ("--mem_len NUMBER", True),
            "pre_lnorm": ("--pre_lnorm True or False", origin in ("authors", "nvidia")),
            "cutoffs": (f"--cutoffs with {n_tails} NUMBERS", not has_cutoffs),
            "n_head": ("--n_head NUMBER", attn_type == 2),
        }
    )
    d_model, n_layer = _width(tensors, "layers.0.dec_attn.layer_norm.weight"), _n_layer(tensors)
    n_head, d_head = _heads(tensors, attn_type, found)
    if len(tables) > 1:
        cutoffs = tuple(accumulate(len(table) for table in tables[:-1]))
    else:
        cutoffs = _cutoffs(found, n_tails, len(tables[0]))
    d_embed = tables[0].shape[1]
    div_val = _div_val(tensors, [table.shape[1] for table in tables], d_model, found)
    mem_len = found.count("mem_len")
    ext_len = found.count("ext_len") or 0
    norm_first = bool(found.flag("pre_lnorm"))
    table_rows = tensors["r_emb"].shape[1] if "r_emb" in tensors else None
    config = {
        "vocab_size": sum(len(table) for table in tables),
        "n_layer": n_layer,
        "n_head": n_head,
        "d_model": d_model,
        "d_head": d_head,
        "d_inner": _rows(tensors, "layers.0.pos_ff.CoreNet.0.weight"),
        "d_embed": d_embed,
        "attn_type": attn_type,
        "n_positions": table_rows,
        "cutoffs": cutoffs,
        "div_val": div_val,
        "mem_len": mem_len,
        "ext_len": ext_len,
        "attn_len": _attn_len(origin, mem_len, found),
        "clamp_len": _clamp_len(origin, attn_type, found),
        "start_memory": "zeros" if origin in ("tensorflow", "huggingface") else "empty",
        "norm_first": norm_first,
        "tie_biases": attn_type == 0 and "r_w_bias" in tensors,
        "tie_embeddings": _ties_embeddings(origin, tensors, found),
        "proj_same_dim": div_val == 1 or _has_all_projections(tensors, len(tables)),
        "dropout": found.number("dropout", 0.0),
        "attn_dropout": found.number("dropatt", 0.0),
        "init_std": found.number("init_std", 0.02),
        "proj_init_std": found.number("proj_init_std", 0.01),
        "norm_eps": found.number("layer_norm_epsilon", 1e-12 if origin == "tensorflow" else 1e-5),
        "quirks": _quirks(origin, attn_type, mem_len, ext_len, norm_first),
    }
    config["tie_projections"] = _ties_projections(tensors, len(cutoffs) + 1, found)
    found.agree({"n_token": config["vocab_size"], "vocab_size": config["vocab_size"]})
    found.agree({name: config[name] for name in ("n_layer", "n_head", "d_head", "d_model")})
    found.agree({name: config[name] for name in ("d_inner", "d_embed", "attn_type")})
    # Such as shared biases, where the positions are absolute and there are none.
    return ModelConfig(**without_unused(ModelConfig, config, unused_in_model))


class _Found:
    """Settings that came with a checkpoint; they may be anything."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def require(self, flags: dict[str, tuple[str, bool]]) -> None:
        """Ask for all that is needed and was not said, at once."""
        missing = {
            name: flag
            for name, (flag, is_needed) in flags.items()
            if is_needed and self._settings.get(name) is None
        }
        if missing:
            python = ", ".join(f"{name!r}: ..." for name in missing)
            raise ValueError(
                f"the checkpoint does not say {', '.join(missing)}, on which the results depend: "
                f"give {' '.join(missing.values())}, in Python settings={{{python}}}, or put it "
                "into a config.json beside the checkpoint"
            )

    def count(self, name: str) -> Any:
        value = self._settings.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name}={value!r} must be a whole number")
        if value is not None and value > _LARGEST:
            raise ValueError(f"{name}={value} is more than {_LARGEST:,}: it cannot be right")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._settings.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}={value!r} must be a number")
        return float(value)

    def flag(self, name: str) -> bool | None:
        value = self._settings.get(name)
        if value not in (None, True, False):
            raise ValueError(f"{name}={value!r} must be true or false")
        return None if value is None else bool(value)

    def many(self, name: str) -> list[Any] | None:
        value = self._settings.get(name)
        if value is None or isinstance(value, list | tuple):
            return None if value is None else list(value)
        raise ValueError(f"{name}={value!r} must be a list")

    def agree(self, facts: dict[str, Any]) -> None:
        for name, fact in facts.items():
            value = self._settings.get(name)
            if value is not None and value != fact:
                raise ValueError(
                    f"{name}={value!r}, but the tensors of the checkpoint say {fact}: the "
                    "settings belong to another model"
                )


def _attn_type(tensors: Mapping[str, Tensor]) -> int:
    if "layers.0.dec_attn.r_net.weight" in tensors:
        return 0
    if "layers.0.dec_attn.qkv_net.weight" in tensors:
        return 1
    if "layers.0.dec_attn.q_net.weight" in tensors:
        return 3 if "r_emb" in tensors else 2
    raise ValueError(
        "the checkpoint has no layers.0.dec_attn: it holds no Transformer-XL by any of the names "
        "that are known"
    )


def _tensor(tensors: Mapping[str, Tensor], name: str, ndim: int) -> Tensor:
    if name not in tensors:
        raise ValueError(f"the checkpoint lacks {name}: it is not complete")
    if tensors[name].ndim != ndim or 0 in tensors[name].shape:
        raise ValueError(f"{name} cannot have the shape {tuple(tensors[name].shape)}")
    return tensors[name]


def _width(tensors: Mapping[str, Tensor], name: str) -> int:
    return _tensor(tensors, name, 1).shape[0]


def _rows(tensors: Mapping[str, Tensor], name: str) -> int:
    return _tensor(tensors, name, 2).shape[0]


def _n_layer(tensors: Mapping[str, Tensor]) -> int:
    n = 0
    while f"layers.{n}.dec_attn.layer_norm.weight" in tensors:
        n += 1
        if n > _MOST_LAYERS:
            raise ValueError(f"more than {_MOST_LAYERS:,} layers: it cannot be right")
    return n


def _tables(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    tables = []
    while (name := f"word_emb.emb_layers.{len(tables)}.weight") in tensors:
        tables.append(_tensor(tensors, name, 2))
    if not tables:
        raise ValueError("the checkpoint lacks word_emb.emb_layers.0.weight: it is not complete")
    return tables


def _heads(tensors: Mapping[str, Tensor], attn_type: int, found: _Found) -> tuple[int, int]:
    if attn_type == 3:
        n_head, d_head = _tensor(tensors, "r_emb", 4).shape[2:]
    elif attn_type == 2:
        n_head = found.count("n_head")
        width = _rows(tensors, "layers.0.dec_attn.q_net.weight")
        if n_head < 1 or width % n_head:
            raise ValueError(f"n_head={n_head} must divide the {width} rows of q_net")
        d_head = width // n_head
    else:
        name = "r_w_bias" if "r_w_bias" in tensors else "layers.0.dec_attn.r_w_bias"
        ndim = 3 if attn_type == 1 else 2
        n_head, d_head = _tensor(tensors, name, ndim).shape[-2:]
    return n_head, d_head


def _cutoffs(found: _Found, n_tails: int, vocab_size: int) -> tuple[int, ...]:
    """Return where the clusters of a single table begin; the tensors only say how many."""
    if not n_tails:
        return ()
    given = found.many("cutoffs") or []
    # Some write the ends of the vocabulary down, too.
    cutoffs = [x for x in given if x not in (0, vocab_size)]
    if len(cutoffs) != n_tails or not all(isinstance(x, int) for x in cutoffs):
        raise ValueError(
            f"cutoffs={given} do not make the {n_tails + 1} clusters that the checkpoint has"
        )
    return tuple(cutoffs)


def _div_val(tensors: Mapping[str, Tensor], widths: list[int], d_model: int, found: _Found) -> int:
    given = found.count("div_val")
    if len(widths) == 1:
        # A projection to the same width is there with a div_val alone, whatever that is.
        is_divided = widths[0] == d_model and "word_emb.emb_projs.0" in tensors
        return max(given or 2, 2) if is_divided else 1
    for div_val in range(2, widths[0] + 1) if given is None else [given]:
        if div_val > 1 and all(w == widths[0] // div_val**i for i, w in enumerate(widths)):
            return div_val
    raise ValueError(
        f"the widths of the embeddings, {widths}, do not fall by the factor "
        + ("of any div_val" if given is None else f"div_val={given}")
    )


def _attn_len(origin: Origin, mem_len: int, found: _Found) -> int | None:
    same_length = found.flag("same_length")
    if not (DEFAULTS[origin]["same_length"] if same_length is None else same_length):
        return None
    # The masks of the authors' PyTorch and of Hugging Face show one key less (TF-3).
    attn_len = mem_len + (origin in ("tensorflow", "nvidia"))
    if not attn_len:
        raise ValueError(
            "same_length with mem_len=0 hides every key in the authors' code: its losses are not "
            "numbers. Give --same_length False"
        )
    return attn_len


def _clamp_len(origin: Origin, attn_type: int, found: _Found) -> int | None:
    clamp_len = found.count("clamp_len")
    clamp_len = DEFAULTS[origin]["clamp_len"] if clamp_len is None else clamp_len
    if clamp_len <= 0 or attn_type == 3:
        return None
    # The authors keep that many rows of a learned table: distances up to one less.
    return clamp_len - 1 if attn_type == 1 else clamp_len


def _ties_embeddings(origin: Origin, tensors: Mapping[str, Tensor], found: _Found) -> bool:
    # transformers ties by a name of its own.
    is_theirs = origin == "huggingface"
    given = found.flag("tie_word_embeddings" if is_theirs else "tie_weight")
    if given is not None:
        return given
    copy = tensors.get("crit.out_layers.0.weight")
    return copy is None or _same(copy, tensors["word_emb.emb_layers.0.weight"])


def _ties_projections(
    tensors: Mapping[str, Tensor], n_clusters: int, found: _Found
) -> tuple[bool, ...]:
    given = found.many("tie_projs")
    if given is not None and not all(isinstance(x, bool | int) for x in given):
        raise ValueError(f"tie_projs={given} must be a list of true and false")
    is_one = "word_emb.emb_layers.1.weight" not in tensors
    ties = []
    for i in range(n_clusters):
        copy = tensors.get(f"crit.out_projs.{i}")
        owner = tensors.get(f"word_emb.emb_projs.{0 if is_one else i}")
        if owner is None:
            ties.append(False)
        elif copy is None:
            ties.append(True)
        elif given is not None and i < len(given):
            ties.append(bool(given[i]))
        else:
            ties.append(_same(copy, owner))
    return tuple(ties)


def _has_all_projections(tensors: Mapping[str, Tensor], n_tables: int) -> bool:
    return all(f"word_emb.emb_projs.{i}" in tensors for i in range(n_tables))


def _same(a: Tensor, b: Tensor) -> bool:
    is_alias = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return a.shape == b.shape and (is_alias or a.equal(b))


def _quirks(
    origin: Origin, attn_type: int, mem_len: int, ext_len: int, norm_first: bool
) -> tuple[Quirk, ...]:
    quirks: list[Quirk] = []
    if attn_type in (2, 3) and mem_len:
        quirks.append("stored_positions")
    # NVIDIA hands the two lengths over in the right order.
    if ext_len and origin == "authors":
        quirks.append("swapped_ext_len")
    if attn_type in (2, 3) and norm_first:
        quirks.append("raw_queries")
    if origin == "tensorflow":
        quirks.append("exact_frequencies")
    return tuple(quirks)
