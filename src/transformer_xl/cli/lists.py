"""Lists of numbers on the command line, divided by spaces or commas."""

from typing import Annotated, Any, get_args, get_origin

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo


def registry() -> ConstructorRegistry:
    """Return the rule by which the parser reads lists of numbers: ``0 128``, ``0,128``, ``0, 128``.

    Texts are not divided at commas, which may belong to them.
    """
    found = ConstructorRegistry()
    found.primitive_rule(_numbers)
    return found


def _numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    parts = get_args(info.type)
    if get_origin(info.type) is not tuple or parts[1:] != (...,):
        return None
    kind = parts[0]
    if get_origin(kind) is Annotated:
        # With a range.
        kind = get_args(kind)[0]
    if kind not in (int, float):
        return None

    def read(words: list[str]) -> tuple[Any, ...]:
        return tuple(kind(x) for word in words for x in word.split(",") if x.strip())

    name = kind.__name__.upper()
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{name} [{name} ...]]",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [*map(str, value)],
    )
