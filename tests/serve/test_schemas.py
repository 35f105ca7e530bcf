"""What a request may ask is what the settings of sampling allow."""

from typing import Annotated, get_args, get_origin, get_type_hints

import pytest

from transformer_xl.config import GenerateConfig
from transformer_xl.config.checks import Range

schemas = pytest.importorskip("transformer_xl.apps.serve.schemas")


def test_the_bounds_of_a_request_are_those_of_the_settings():
    hints = get_type_hints(GenerateConfig, include_extras=True)
    schema = schemas.CompletionRequest.model_json_schema()["properties"]
    words = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    n_compared = 0
    for name in schemas.SAMPLING:
        # Of X | None, X.
        hint = next((x for x in get_args(hints[name]) if get_origin(x) is Annotated), hints[name])
        limits = next((x for x in getattr(hint, "__metadata__", ()) if isinstance(x, Range)), None)
        if limits is None:
            continue
        found = next(part for part in schema[name]["anyOf"] if part["type"] != "null")
        for key, word in words.items():
            expected = getattr(limits, key)
            if (key, expected) == ("gt", 0) and found["type"] == "integer":
                word, expected = "minimum", 1
            if expected is not None:
                assert found[word] == expected, (name, word)
                n_compared += 1
    assert n_compared > 15
