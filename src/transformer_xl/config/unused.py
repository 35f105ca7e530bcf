"""Settings that have no effect in combination with others, which are errors.

Each function yields such settings of a section. It takes any object with the settings as
attributes, so that stored settings can be examined before validation: those that earlier versions
accepted are dropped when loaded (:func:`without_unused`).

Settings of absent parts that the paper's own configurations contain are accepted:
``variational_dropout`` without dropout, ``tie_projections`` and ``proj_init_std`` without
projections.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, NamedTuple

from transformer_xl.config.checks import checked, require


class Unused(NamedTuple):
    """A setting without effect, which must be left at its default."""

    name: str
    """The setting."""
    beside: str
    """The settings that make it ineffective."""
    part: str | None = None
    """The item of a list that has no effect. None: the setting as a whole."""


_ATTENTION = (
    *("n_head", "d_head", "d_inner", "activation", "attn_type", "n_positions", "attn_len"),
    *("clamp_len", "start_memory", "norm_first", "gate", "norm", "qk_norm", "final_norm"),
    *("enhanced_recurrence", "tie_biases", "attn_dropout", "qkv_dropout", "ff_dropout"),
    *("norm_eps", "quirks", "ext_len"),
)


def unused_in_model(model: Any) -> Iterator[Unused]:
    """Yield the model settings without effect."""
    if model.kind == "lstm":
        about = "kind='lstm', which has no attention, feed-forward layers or normalization"
        yield from (Unused(name, about) for name in _ATTENTION)
        return
    about = f"attn_type={model.attn_type}"
    if model.attn_type == 3:
        yield Unused("clamp_len", f"{about}: distances end with the table, at n_positions")
    if model.attn_type in (2, 3):
        yield Unused("tie_biases", f"{about}, which has no attention biases")
    if model.attn_type in (0, 1):
        yield Unused("quirks", f"{about}: no positions are stored", "stored_positions")
    if model.attn_type in (1, 3):
        yield Unused("quirks", f"{about}, which has no sinusoids", "exact_frequencies")
    if not model.norm_first:
        yield Unused("quirks", "norm_first=False: no queries are normalized", "raw_queries")
    width = model.d_embed or model.d_model
    widths = [width // model.div_val**i for i in range(len(model.cutoffs) + 1)]
    if model.div_val == 1 or model.d_model not in widths:
        about = f"div_val={model.div_val} and clusters of the widths {widths}"
        yield Unused("proj_same_dim", f"{about}: no projection is left out")


def unused_in_data(data: Any) -> Iterator[Unused]:
    """Yield the data settings without effect."""
    if data.tokenizer is None and data.vocab not in ("words", "bpe", "integers"):
        yield Unused("vocab_size", f"vocab={data.vocab!r}")
    if data.tokenizer is None and data.vocab not in ("words", "chars"):
        yield Unused("vocab_from", f"vocab={data.vocab!r}: nothing is counted")
    if data.name.startswith("hf:"):
        yield Unused("path", f"name={data.name!r}, which says where the text is")


def unused_in_training(train: Any) -> Iterator[Unused]:
    """Yield the training settings without effect."""
    if train.optimizer != "muon":
        yield Unused("muon_lr", f"optimizer={train.optimizer!r}")
    starts_with_cooldown = train.average == "tail" and train.average_start is None
    if train.schedule != "constant_cooldown" and not starts_with_cooldown:
        yield Unused("cooldown_fraction", f"schedule={train.schedule!r}")
    if train.average == "none":
        yield Unused("average_start", "average='none'")
    if train.average != "ema":
        yield Unused("average_decay", f"average={train.average!r}")


def unused_with_model(model: Any) -> Iterator[Unused]:
    """Yield the training settings without effect for a model."""
    if model.kind == "lstm":
        yield Unused("recompute", "model.kind='lstm': its layers keep what they computed")
        yield Unused("compile", "model.kind='lstm': its layers are compiled already")


def unused_in_evaluation(model: Any) -> Iterator[Unused]:
    """Yield the evaluation settings without effect for a model."""
    lengths = ("attn_len", "clamp_len", "ext_len")
    yield from (unused for unused in unused_in_model(model) if unused.name in lengths)


def refuse_unused(settings: Any, found: Iterator[Unused]) -> None:
    """Refuse settings without effect that are not at their defaults.

    Raises:
        ValueError: There is one.
    """
    defaults = {field.name: field.default for field in fields(settings)}
    for name, beside, part in found:
        value, default = getattr(settings, name), defaults[name]
        is_used = value == default if part is None else part not in value
        remedy = f"leave it at {default!r}" if part is None else f"leave out {part!r}"
        require(
            is_used, f"{name}={value!r} has no effect with {beside}; {remedy}, or change the other"
        )


def without_unused(
    kind: type, values: Mapping[str, Any], find: Callable[[Any], Iterator[Unused]]
) -> dict[str, Any]:
    """Return stored settings of a section, not validated yet, without those that have no effect.

    Args:
        kind: The settings class.
        values: The stored settings.
        find: Yields the settings without effect.
    """
    kept = dict(values)
    defaults = {field.name: field.default for field in fields(kind)}
    try:
        for name, _, part in find(SimpleNamespace(**(defaults | kept))):
            if part is None and name in kept:
                # A value that no version could have stored is invalid.
                checked(kind, {name: kept.pop(name)})
            elif isinstance(kept.get(name), list | tuple):
                kept[name] = [x for x in kept[name] if x != part]
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        # The validation that follows reports wrong types.
        return dict(values)
    return kept
