"""The reference, written from the program: API, commands, recipes and settings.

The pages are written to ``docs/generated`` when the site is built and are never committed.
"""

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from importlib import import_module
from inspect import isclass, isroutine
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints
from unittest import mock

from docstrings import with_math
from sphinx.application import Sphinx

import transformer_xl
from transformer_xl.cli import commands, parse
from transformer_xl.cli.given import field_docstrings
from transformer_xl.config import Config
from transformer_xl.config.checks import Range, fields_of
from transformer_xl.config.model import KINDS
from transformer_xl.config.recipes import recipe_names, recipe_text

HELP_COLUMNS = 92


class Part(NamedTuple):
    """A page of the API."""

    title: str
    about: str
    module: str
    """The module that the names are imported from."""
    names: Sequence[str]


_TOP = (
    ("Models", "Load a model, build one, or call it.", (
        "from_pretrained", "load_vocab", "shipped_path", "TransformerXL", "LanguageModel",
        "register_model", "PositionScheme", "Positions", "Memory", "compact", "rel_attention",
        "Vocab",
    )),
    ("Training", "Settings, recipes, corpora, and the training itself.", (
        "load_recipe", "train", "prepare", "Config", "ModelConfig", "DataConfig", "TrainConfig",
        "EvalConfig", "GenerateConfig",
    )),
    ("Evaluation and generation", "Read a text and write one.", (
        "evaluate", "Result", "WithMemory", "SlidingWindow", "Dynamic",
        "generate", "generate_batch", "Sampling",
        "Session", "State",
    )),
    ("Other formats", "Old checkpoints in, other programs out.", ("convert", "export")),
    ("Errors", "What the library raises, to be caught by kind.", (
        "TxlError", "SettingsError", "InputError", "DataError", "CheckpointError",
    )),
)  # fmt: skip
"""The public names of the package, by what one wants to do."""

_PACKAGES = (
    ("model", "The network and its parts."),
    ("ops", "Relative attention and other operations, usable without the rest."),
    ("data", "Text to tokens to streams."),
    ("data.recordings", "Real-valued inputs: recordings in arrays."),
    ("inference.evaluate", "How well a model predicts a text."),
    ("inference.generate", "Writing, token by token, with memory."),
    ("inference.answers", "Losses, features and continuations of texts of any length."),
    ("tasks.series.forecast", "Real-valued series, continued by sampling."),
    ("config.music", "Settings of music."),
    ("studies.baselines", "What a text takes without training by gradient."),
    ("interop.convert", "Old checkpoints."),
    ("interop.export", "A step of the model for other programs."),
    ("hf", "Classes for the library transformers."),
    ("train", "The training loop, its state and its step."),
    ("studies.models", "Models to compare with."),
    ("tasks.task", "What a downstream task is."),
    ("tasks", "Downstream tasks by name."),
    ("tasks.run", "Trains and measures the models of a task, beside its baselines."),
    ("tasks.music", "Music of a model of integers: MIDI files."),
    ("apps.compress", "Lossless compression."),
)


def api_parts() -> list[Part]:
    """Return all pages of the API; each public object is on exactly one of them.

    Raises:
        ValueError: A public name of the package has no page.
    """
    parts = [Part(title, about, "transformer_xl", names) for title, about, names in _TOP]
    placed = {name for part in parts for name in part.names}
    if missing := {*transformer_xl.__all__} - placed - {"__version__"}:
        raise ValueError(f"scripts/docs/reference_pages.py has no page for {sorted(missing)}")
    seen = {id(getattr(transformer_xl, name)) for name in placed}
    for package, about in _PACKAGES:
        module = import_module(f"transformer_xl.{package}")
        names = []
        for name in sorted(public_names(module), key=str.lower):
            thing = getattr(module, name)
            if (isclass(thing) or isroutine(thing)) and id(thing) not in seen:
                seen.add(id(thing))
                names.append(name)
        parts.append(Part(f"transformer_xl.{package}", about, module.__name__, names))
    return parts


def public_names(module: Any) -> list[str]:
    """Return ``__all__`` of a module; without it, what the module defines or imports as public."""
    if (names := getattr(module, "__all__", None)) is not None:
        return [*names]
    prefix = module.__name__
    own = (prefix, "transformer_xl.interop.hf")
    return [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and str(getattr(thing, "__module__", "")).startswith(own)
    ]


def _titled(title: str, mark: str = "=") -> str:
    return f"{title}\n{mark * len(title)}\n"


def _api_page(part: Part) -> str:
    lines = [_titled(part.title), part.about, "", f".. currentmodule:: {part.module}", ""]
    module = import_module(part.module)
    for name in part.names:
        thing = getattr(module, name)
        kind = "class" if isclass(thing) else "function"
        lines += [_titled(name, "-"), f".. auto{kind}:: {name}"]
        lines += ["   :members:", "   :show-inheritance:"] if kind == "class" else []
        if thing is Config or thing in get_type_hints(Config).values():
            # Fields are on the page of the settings.
            names = ", ".join(x.name for x in fields(thing))
            lines += [
                f"   :exclude-members: {names}",
                "",
                "Its fields: :doc:`/generated/settings`.",
            ]
        lines += [""]
    return "\n".join(lines)


def _index(title: str, about: str, entries: Sequence[str], depth: int = 1) -> str:
    lines = [_titled(title), about, "", ".. toctree::", f"   :maxdepth: {depth}", ""]
    return "\n".join([*lines, *(f"   {entry}" for entry in entries), ""])


def help_of(command: str) -> str:
    """Return what ``txl COMMAND --help`` prints; without a command, ``txl --help``."""
    printed = io.StringIO()
    size = {"COLUMNS": str(HELP_COLUMNS), "NO_COLOR": "1", "TERM": "dumb"}
    ends = contextlib.suppress(SystemExit)
    with mock.patch.dict(os.environ, size), contextlib.redirect_stdout(printed), ends:
        parse([*command.split(), "--help"])
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def _literal(text: str, language: str) -> str:
    return "\n".join(
        [f".. code-block:: {language}", "", *(f"   {x}".rstrip() for x in text.splitlines()), ""]
    )


def _recipes() -> str:
    about = (
        "Complete settings of a training, each a TOML file. ``txl recipes NAME --copy mine.toml`` "
        "writes one to a file to change; :doc:`settings` explains each line."
    )
    lines = [_titled("Recipes"), about, ""]
    for name in recipe_names():
        lines += [f".. _recipe-{name}:", "", _titled(name, "-")]
        lines += [_literal(recipe_text(name), "toml")]
    return "\n".join(lines)


def _settings() -> str:
    about = (
        "Every setting of a recipe and of the command line: a line ``lr = 0.001`` in section "
        "``[train]`` of a recipe is ``--train.lr 0.001`` of ``txl train``. Settings that a recipe "
        "does not have are at their default."
    )
    lines = [_titled("Settings"), about, ""]
    for section, kind in get_type_hints(Config).items():
        lines += [_titled(f"[{section}]", "-"), (kind.__doc__ or "").partition("\n")[0], ""]
        texts = field_docstrings(kind)
        for name, field in fields_of(kind).items():
            default = field.default
            if default is MISSING and field.default_factory is not MISSING:
                default = field.default_factory()
            lines += [f".. confval:: {section}.{name}", f"   :type: ``{_type(field.type)}``"]
            lines += [] if default is MISSING else [f"   :default: ``{default!r}``"]
            lines += ["", f"   {with_math(texts[name])}{_kinds(name) * (section == 'model')}", ""]
    return "\n".join(lines)


def _kinds(name: str) -> str:
    """Return which kinds of models have a setting, if not all have."""
    kinds = [kind for kind, settings in KINDS.items() if name in fields_of(settings)]
    named = ", ".join(f"``{kind}``" for kind in kinds or ["transformer_xl"])
    return "" if len(kinds) == len(KINDS) else f" Only with kind {named}."


def _type(hint: Any) -> str:
    """Return a type with its limits: ``int > 0``."""
    base, *limits = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint,)
    if limits and isinstance(limits[0], Range):
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        values = ((sign, getattr(limits[0], name)) for name, sign in signs.items())
        # No limit of integers that are so large is worth a word.
        words = [f"{sign} {x}" for sign, x in values if x is not None and abs(x) < 2**64]
        return f"{_type(base)} {', '.join(words)}".strip()
    if get_origin(base) in (Union, UnionType):
        return " | ".join(map(_type, get_args(base)))
    if get_origin(base) is tuple:
        return f"tuple[{', '.join('...' if x is ... else _type(x) for x in get_args(base))}]"
    if isinstance(base, type):
        return "None" if base is NoneType else base.__name__
    return str(base).replace("typing.", "")


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path below ``docs/generated`` and the text of each page."""
    parts = api_parts()
    names = [part.title.replace("transformer_xl.", "").lower().replace(" ", "-") for part in parts]
    for name, part in zip(names, parts, strict=True):
        yield f"api/{name}.rst", _api_page(part)
    things = [getattr(import_module(part.module), name) for part in parts for name in part.names]
    n_shown = sum(">>>" in (thing.__doc__ or "") for thing in things)
    about = (
        "The public names of the package, with shapes in their signatures. Letters of shapes are "
        "explained in the :doc:`glossary </glossary>`; lengths are in tokens, losses in nats. "
        f"{n_shown} of {len(things)} have an example in their description, and a test runs each; "
        "more code is in :doc:`/python` and the tutorials."
    )
    yield "api.rst", _index("Python API", about, [f"api/{name}" for name in names], 2)
    for name in commands():
        text = _titled(f"txl {name}") + "\n" + _literal(help_of(name), "text")
        yield f"commands/{name}.rst", text
    about = "What ``txl COMMAND --help`` prints.\n\n" + _literal(help_of(""), "text")
    yield "commands.rst", _index("Commands", about, [f"commands/{name}" for name in commands()])
    yield "recipes.rst", _recipes()
    yield "settings.rst", _settings()


def write_pages(folder: Path, written: Iterator[tuple[str, str]]) -> set[Path]:
    """Write pages whose text has changed; return the paths of all of them."""
    paths = set()
    for name, text in written:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text("utf-8") != text:
            path.write_text(text, encoding="utf-8")
        paths.add(path)
    return paths


def _write_all(app: Sphinx) -> None:
    import annotated_pages

    folder = Path(app.srcdir) / "generated"
    paths = write_pages(folder, pages()) | write_pages(folder, annotated_pages.pages())
    for path in folder.rglob("*.rst"):
        if path not in paths:
            path.unlink()


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages before Sphinx looks for documents."""
    app.connect("builder-inited", _write_all)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
