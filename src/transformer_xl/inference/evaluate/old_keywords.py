"""The keyword arguments of ``evaluate`` before it took a strategy; removed after one version."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from transformer_xl.config import listed, near, require
from transformer_xl.inference.evaluate.dynamic import Dynamic
from transformer_xl.inference.evaluate.strategies import (
    SlidingWindow,
    Strategy,
    WithMemory,
    WithNeighbours,
)

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
    kinds = {"window": SlidingWindow, "dynamic": Dynamic, "knn": WithNeighbours}
    chosen = [name for name in kinds if name in values]
    require(len(chosen) < 2, f"{' and '.join(chosen)} exclude each other: leave out one of them")
    kind = kinds[chosen[0]] if chosen else WithMemory
    dynamic = values.pop("dynamic", None)
    require(
        dynamic is None or isinstance(dynamic, Dynamic),
        f"dynamic={dynamic!r} must be a Dynamic, as plan_dynamic returns one",
    )
    names = {x.name for x in fields(kind) if x.init}
    settings = {name: value for name, value in values.items() if name in names}
    for name in values.keys() - names:
        # What has no effect may have the value without one.
        require(
            values[name] == (name == "batch_size") or name == "segment_len",
            f"{name}={values[name]} has no effect with {kind.__name__}: leave it out",
        )
    how = kind(**settings) if dynamic is None else replace(dynamic, **settings)
    shown = [f"{name}=..." if name == "knn" else listed({name: x}) for name, x in settings.items()]
    form = ", ".join(["..."] * (dynamic is not None) + shown)
    return how, (
        f"evaluate({listed(keywords)}) is deprecated: use evaluate(model, ids, "
        f"{kind.__name__}({form}))"
    )
