"""The keyword arguments of ``evaluate`` before it took a strategy; removed after one version."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from transformer_xl.config.checks import near
from transformer_xl.inference.evaluate.dynamic import Dynamic
from transformer_xl.inference.evaluate.strategies import (
    SlidingWindow,
    Strategy,
    WithMemory,
    WithNeighbours,
)
from transformer_xl.model.arguments import shown

_KEYWORDS = (*(x.name for x in fields(WithMemory)), "window", "dynamic", "knn")


def strategy_from(keywords: Mapping[str, Any]) -> tuple[Strategy, str]:
    """Return the strategy that deprecated keyword arguments describe, and the text of a warning.

    Raises:
        TypeError: A name is unknown.
        ValueError: A value is out of range, or two of them exclude each other.
    """
    for name in keywords.keys() - {*_KEYWORDS}:
        nearest = near(name, _KEYWORDS)
        hint = f": did you mean {nearest!r}?" if nearest else ""
        raise TypeError(f"evaluate() got an unexpected keyword argument {name!r}{hint}")
    values = {name: value for name, value in keywords.items() if value is not None}
    _require_fitting(**values)
    window, dynamic, knn = (values.pop(name, None) for name in ("window", "dynamic", "knn"))
    first = ""
    if window is None and dynamic is None and knn is None:
        how = WithMemory(**values)
    elif window is not None:
        for name in ("segment_len", "mem_len", "ext_len"):
            values.pop(name, None)
        values = {"window": window, **values}
        how = SlidingWindow(**values)
    else:
        values.pop("batch_size", None)
        if dynamic is not None:
            values.pop("ext_len", None)
            first, how = "...", replace(dynamic, **values)
        else:
            first, how = "knn=...", WithNeighbours(knn=knn, **values)
    arguments = ", ".join(filter(None, (first, listed(values))))
    return how, (
        f"evaluate({listed(keywords)}) is deprecated: use evaluate(model, ids, "
        f"{type(how).__name__}({arguments}))"
    )


def listed(keywords: Mapping[str, Any]) -> str:
    """Return keyword arguments as they are written in a call."""
    return ", ".join(f"{name}={shown(value)}" for name, value in keywords.items())


def _require_fitting(
    window: Any = None, dynamic: Any = None, knn: Any = None, batch_size: Any = 1, **others: Any
) -> None:
    if dynamic is not None and not isinstance(dynamic, Dynamic):
        raise ValueError(f"dynamic={dynamic!r} must be a Dynamic, as plan_dynamic returns one")
    if window is not None:
        _require_none(f"window={window} reads anew what", others)
        if (max_steps := others.get("max_steps")) is not None:
            raise ValueError(
                f"max_steps={max_steps} with window={window}: windows are not divided into "
                "segments; leave out one of them"
            )
    if dynamic is not None:
        _require_none("dynamic evaluation reads once what", {"ext_len": others.get("ext_len")})
        if window is not None or batch_size != 1:
            raise ValueError(
                f"dynamic evaluation reads one stream with memory: window={window} and "
                f"batch_size={batch_size} must be None and 1"
            )
    if knn is not None and (window is not None or dynamic is not None or batch_size != 1):
        raise ValueError(
            f"knn searches the past of one stream: batch_size={batch_size} must be 1, window="
            f"{window} None, and dynamic evaluation, which changes what hidden states mean, off"
        )


def _require_none(why: str, values: Mapping[str, Any]) -> None:
    for name in ("mem_len", "ext_len"):
        if value := values.get(name):
            raise ValueError(
                f"{why} {name}={value} would have kept or read again: leave it out, or set it to 0"
            )
