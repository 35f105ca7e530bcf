"""The settings of an old model: from the shapes of its tensors and from its settings files.

Names are those of the authors' constructor (``n_token``, ``pre_lnorm``, ``same_length``, ...), and
``layer_norm_epsilon`` as Hugging Face calls it.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Literal

import msgspec
from torch import Tensor

from transformer_xl.config import ModelConfig, create_from_stored
from transformer_xl.errors import SettingsError

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

_Count = Annotated[int, msgspec.Meta(le=1 << 24)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Flag = bool | Literal[0, 1]


class OldSettings(msgspec.Struct, omit_defaults=True):
    """The settings of a checkpoint that are used, by the authors' names; None: not given."""

    n_head: _Count | None = None
    mem_len: _Count | None = None
    tgt_len: _Count | None = None
    ext_len: _Count = 0
    clamp_len: _Count | None = None
    div_val: _Positive | None = None
    dropout: float = 0.0
    dropatt: float = 0.0
    init_std: float = 0.02
    proj_init_std: float = 0.01
    layer_norm_epsilon: float | None = None
    same_length: _Flag | None = None
    pre_lnorm: _Flag | None = None
    tie_weight: _Flag | None = None
    tie_word_embeddings: _Flag | None = None
    cutoffs: list[int] | None = None
    tie_projs: list[_Flag] = []

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> "OldSettings":
        """Convert the settings of a file or of a caller.

        Raises:
            SettingsError: One has another type.
        """
        names = {name: settings[name] for name in cls.__struct_fields__ if name in settings}
        try:
            return msgspec.convert({k: x for k, x in names.items() if x is not None}, cls)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise SettingsError(
                f"the settings, of the checkpoint or given, cannot be: {error}"
            ) from error


def model_config(
    origin: Origin, tensors: Mapping[str, Tensor], settings: Mapping[str, object]
) -> ModelConfig:
    """Return settings with which an old checkpoint has the same results as before.

    Raises:
        SettingsError: One that is needed is missing, or one contradicts the tensors.
    """
    old = OldSettings.of(settings)
    attn_type = _attn_type(tensors)
    tables = _tables(tensors)
    widths = [table.shape[1] for table in tables]
    name = "crit.cluster_weight"
    n_tails = len(_tensor(tensors, name, 2)) if name in tensors else 0
    needed = {"mem_len": "--mem_len NUMBER"}
    if origin in ("authors", "nvidia"):
        needed["pre_lnorm"] = "--pre_lnorm True or False"
    if len(tables) == 1 and n_tails:
        needed["cutoffs"] = f"--cutoffs with {n_tails} NUMBERS"
    if attn_type == 2:
        needed["n_head"] = "--n_head NUMBER"
    if missing := [name for name in needed if getattr(old, name) is None]:
        python = ", ".join(f"{name!r}: ..." for name in missing)
        raise SettingsError(
            f"the checkpoint does not say {', '.join(missing)}, on which the results depend: "
            f"give {' '.join(needed[x] for x in missing)}, in Python settings={{{python}}}, or "
            "put it into a config.json beside the checkpoint"
        )
    old = msgspec.structs.replace(
        old,
        **{name: x for name, x in DEFAULTS[origin].items() if getattr(old, name) is None},
    )
    n_head, d_head = _heads(tensors, attn_type, old.n_head)
    if len(tables) > 1:
        cutoffs = tuple(accumulate(len(table) for table in tables[:-1]))
    else:
        cutoffs = _cutoffs(old.cutoffs or [], n_tails, len(tables[0]))
    norm = "layers.{}.dec_attn.layer_norm.weight"
    d_model = len(_tensor(tensors, norm.format(0), 1))
    div_val = _div_val(tensors, widths, d_model, old.div_val)
    mem_len, ext_len, norm_first = old.mem_len or 0, old.ext_len, bool(old.pre_lnorm)
    has_all_projections = all(f"word_emb.emb_projs.{i}" in tensors for i in range(len(tables)))
    # The masks of the authors' PyTorch and of Hugging Face hide one more key than the others.
    n_visible = mem_len + int(origin in ("tensorflow", "nvidia"))
    if old.same_length and not n_visible:
        raise SettingsError(
            "same_length with mem_len=0 hides every key in the authors' code: its losses are "
            "NaN. Give --same_length False, or leave it out"
        )
    clamp_len = old.clamp_len if attn_type != 3 and (old.clamp_len or 0) > 0 else None
    if clamp_len is not None and attn_type == 1:
        # The table of the authors has clamp_len rows: the largest distance is one less.
        clamp_len -= 1
    quirks = {
        "stored_positions": attn_type in (2, 3) and mem_len != 0,
        # Unlike the authors' code, NVIDIA's passes the two lengths in the right order.
        "swapped_ext_len": ext_len != 0 and origin == "authors",
        "raw_queries": attn_type in (2, 3) and norm_first,
        "exact_frequencies": origin == "tensorflow",
    }
    norm_eps = 1e-12 if origin == "tensorflow" else 1e-5
    config = {
        "vocab_size": sum(len(table) for table in tables),
        "n_layer": sum(norm.format(n) in tensors for n in range(_MOST_LAYERS)),
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
        "attn_len": n_visible if old.same_length else None,
        "clamp_len": clamp_len,
        "start_memory": "zeros" if origin in ("tensorflow", "huggingface") else "empty",
        "norm_first": norm_first,
        "tie_biases": attn_type == 0 and "r_w_bias" in tensors,
        "tie_embeddings": _ties_embeddings(origin, tensors, old),
        "proj_same_dim": div_val == 1 or has_all_projections,
        "dropout": old.dropout,
        "attn_dropout": old.dropatt,
        "init_std": old.init_std,
        "proj_init_std": old.proj_init_std,
        "norm_eps": norm_eps if old.layer_norm_epsilon is None else old.layer_norm_epsilon,
        "quirks": tuple(quirk for quirk, is_theirs in quirks.items() if is_theirs),
        "tie_projections": _ties_projections(tensors, len(cutoffs) + 1, old.tie_projs),
    }
    facts = {"n_token": config["vocab_size"]}
    names = ("vocab_size", "n_layer", "n_head", "d_head", "d_model", "d_inner", "d_embed")
    facts |= {name: config[name] for name in (*names, "attn_type")}
    for name, fact in facts.items():
        if settings.get(name) not in (None, fact):
            raise SettingsError(
                f"{name}={settings[name]!r}, but the tensors of the checkpoint say {fact}: the "
                "settings belong to another model"
            )
    # Such as shared biases with absolute positions, which have no biases.
    return create_from_stored(ModelConfig, config)


def _attn_type(tensors: Mapping[str, Tensor]) -> int:
    for net, attn_type in (("r_net", 0), ("qkv_net", 1), ("q_net", 3 if "r_emb" in tensors else 2)):
        if f"layers.0.dec_attn.{net}.weight" in tensors:
            return attn_type
    raise SettingsError(
        "the checkpoint has no layers.0.dec_attn: it holds no Transformer-XL by any of the names "
        "that are known"
    )


def _tensor(tensors: Mapping[str, Tensor], name: str, ndim: int) -> Tensor:
    x = tensors.get(name)
    if x is None or x.ndim != ndim or 0 in x.shape:
        shape = "" if x is None else f" of another shape than {tuple(x.shape)}"
        raise SettingsError(f"the checkpoint lacks {name}{shape}: it is not complete")
    return x


def _tables(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    tables: list[Tensor] = []
    while (name := f"word_emb.emb_layers.{len(tables)}.weight") in tensors or not tables:
        tables.append(_tensor(tensors, name, 2))
    return tables


def _heads(tensors: Mapping[str, Tensor], attn_type: int, n_head: int | None) -> tuple[int, int]:
    if attn_type == 2:
        assert n_head is not None
        width = len(_tensor(tensors, "layers.0.dec_attn.q_net.weight", 2))
        if n_head < 1 or width % n_head:
            raise SettingsError(f"n_head={n_head} must divide the {width} rows of q_net")
        return n_head, width // n_head
    name = "r_w_bias" if "r_w_bias" in tensors else "layers.0.dec_attn.r_w_bias"
    name, ndim = {0: (name, 2), 1: (name, 3), 3: ("r_emb", 4)}[attn_type]
    n_head, d_head = _tensor(tensors, name, ndim).shape[-2:]
    return n_head, d_head


def _cutoffs(numbers: Sequence[int], n_tails: int, vocab_size: int) -> tuple[int, ...]:
    """Return the cutoffs of a single table, of which the tensors only determine the number."""
    # Some lists include the ends.
    cutoffs = tuple(x for x in numbers if n_tails and x not in (0, vocab_size))
    if len(cutoffs) != n_tails:
        raise SettingsError(
            f"cutoffs={[*numbers]} do not define the {n_tails + 1} clusters of the checkpoint"
        )
    return cutoffs


def _div_val(
    tensors: Mapping[str, Tensor], widths: list[int], d_model: int, setting: int | None
) -> int:
    if len(widths) == 1:
        # A projection to the same width exists only with div_val > 1, whatever its value.
        is_divided = widths[0] == d_model and "word_emb.emb_projs.0" in tensors
        return max(setting or 2, 2) if is_divided else 1
    for div_val in range(2, widths[0] + 1) if setting is None else [setting]:
        if all(width == widths[0] // div_val**i for i, width in enumerate(widths)):
            return div_val
    # The shapes of the tensors are compared with these settings later.
    return setting or 2


def _ties_embeddings(origin: Origin, tensors: Mapping[str, Tensor], old: OldSettings) -> bool:
    # transformers has its own setting for tying.
    ties = old.tie_word_embeddings if origin == "huggingface" else old.tie_weight
    copy = tensors.get("crit.out_layers.0.weight")
    if ties is not None or copy is None:
        return ties is None or bool(ties)
    return _same(copy, tensors["word_emb.emb_layers.0.weight"])


def _ties_projections(
    tensors: Mapping[str, Tensor], n_clusters: int, stored_ties: Sequence[int]
) -> tuple[bool, ...]:
    is_one = "word_emb.emb_layers.1.weight" not in tensors
    ties = []
    for i in range(n_clusters):
        copy = tensors.get(f"crit.out_projs.{i}")
        owner = tensors.get(f"word_emb.emb_projs.{0 if is_one else i}")
        if owner is None or copy is None:
            ties.append(owner is not None)
        else:
            ties.append(bool(stored_ties[i]) if i < len(stored_ties) else _same(copy, owner))
    return tuple(ties)


def _same(a: Tensor, b: Tensor) -> bool:
    is_alias = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return a.shape == b.shape and (is_alias or a.equal(b))
