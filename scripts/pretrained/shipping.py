"""Writes a model into the package, and checks those that are there.

    python scripts/pretrained/shipping.py RUN NAME VERSION --card card.md --about model.toml
    python scripts/pretrained/shipping.py --check

The weights of the best model of a run are rounded to bfloat16 and written with its vocabulary, its
recipe, its cards (`config/shipped.py` says what is in them) and checksums to
src/transformer_xl/pretrained/NAME-VERSION. Nothing is written if that folder exists or would be
incomplete. A new recipe for the defaults of generation is given by --recipe.
"""

import argparse
import re
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open

import transformer_xl
from transformer_xl.config import files
from transformer_xl.config.checks import require
from transformer_xl.config.recipes import load_recipe, recipe_of
from transformer_xl.config.shipped import CARD_FILE, SUMS_FILE, TEXT_FILE, ShippedModel
from transformer_xl.data import Vocab, load_vocab
from transformer_xl.inference.generate import from_pretrained
from transformer_xl.model.pretrained import CONFIG_FILE, WEIGHTS_FILE, ModelFolder

ROOT = Path(__file__).parents[2]
HEADINGS = ("Data", "Licence", "Revision", "Command", "Hardware", "Hours", "Figures", "Limits")
"""What a card for readers must say, each under a heading of this name."""
FILES = (
    *(CONFIG_FILE, WEIGHTS_FILE, "vocab.json", "tokenizer.json", "recipe.toml"),
    *(CARD_FILE, TEXT_FILE, SUMS_FILE),
)
LARGEST = 20_000_000
"""Bytes of all shipped models together."""


def ship(run: Path, name: str, version: int, card: Path, about: Path, recipe: Path | None) -> Path:
    """Write a model into the package; return its folder.

    Raises:
        FileExistsError: This version is there already.
        ValueError: Something is missing or wrong; nothing was written.
    """
    target = new_target(name, version)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / target.name
        write_rounded(run, folder, recipe)
        shutil.copy(card, folder / TEXT_FILE)
        shutil.copy(about, folder / CARD_FILE)
        put(folder, target)
    return target


def new_target(name: str, version: int) -> Path:
    """Return the folder that a model will have in the package.

    Raises:
        FileExistsError: This version is there already.
        ValueError: A shipped model cannot have this name or version.
    """
    require(
        re.fullmatch(r"[a-z][a-z0-9-]*", name) is not None,
        f"name={name!r} must have small letters, digits and hyphens, a letter first",
    )
    require(
        re.search(r"-[0-9]+$", name) is None,
        f"name={name!r} ends like a version: give the number after it, as in `{name[:-2]} 1`",
    )
    require(version >= 1, f"version={version} must be at least 1")
    target = files.SHIPPED / f"{name}-{version}"
    files.require_new(target)
    return target


def put(folder: Path, target: Path) -> None:
    """Add the checksums to a complete folder, check it, and copy it into the package, atomically.

    Raises:
        FileExistsError: The target is there already.
        ValueError: Something is missing or wrong; nothing was written.
    """
    write_sums(folder)
    if wrong := problems(folder):
        raise ValueError("; ".join(wrong))
    target.parent.mkdir(parents=True, exist_ok=True)
    # No name of a model begins with a dot.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        copied = Path(temporary) / target.name
        shutil.copytree(folder, copied)
        files.require_new(target)
        copied.replace(target)


def write_sums(folder: Path) -> None:
    """Write the checksums of all files in a folder to ``SHA256SUMS``, atomically."""
    names = sorted({file.name for file in folder.iterdir()} - {SUMS_FILE})
    lines = (f"{files.checksum(folder / name)}  {name}\n" for name in names)
    files.replace_file(folder / SUMS_FILE, "".join(lines).encode())


def require_own_package() -> None:
    """Require that the package of this checkout is imported, into which models are written."""
    own, imported = ROOT / "src" / "transformer_xl", Path(transformer_xl.__file__).parent
    require(
        imported.resolve() == own.resolve(),
        f"the imported package is {imported}, and not {own}, that of this program: set "
        f"PYTHONPATH={own.parent}, or install that checkout",
    )


def write_rounded(
    run: Path,
    folder: Path,
    recipe: Path | None = None,
    mem_len: int | None = None,
    preface: str = "",
) -> None:
    """Write the best model of a run in bfloat16, with its vocabulary and its recipe.

    Args:
        run: The run, or a model folder.
        folder: Where it is written.
        recipe: The recipe. None: that of the run.
        mem_len: The memory of the model. None: that of the run.
        preface: The text that is read before a text is generated.

    Raises:
        ValueError: There is no recipe, or the preface does not fit into the memory.
    """
    source = ModelFolder.find(run)
    config = source.read_config()
    weights = source.read_weights(config)
    settings = load_recipe(recipe) if recipe else recipe_of(run)
    if settings is None:
        raise ValueError(f"{run} has no recipe.toml: give --recipe")
    # transformers would load weights in the precision of the file.
    about: dict[str, object] = {"transformers": {"dtype": "float32"}}
    config, vocab = replace(config, mem_len=mem_len or config.mem_len), load_vocab(source.path)
    if tokens := vocab.encode(preface):
        require(
            len(tokens) < config.mem_len,
            f"{len(tokens)} tokens of a preface, mem_len={config.mem_len}: it must fit into the "
            "memory: else sessions, which read token by token, write other texts; shorten it",
        )
        about["preface"] = tokens
    rounded = {x: y.bfloat16() for x, y in weights.items()}
    ModelFolder(folder).write(config, rounded, about)
    # In one line: line breaks and indentation are more than half of its bytes.
    Vocab(vocab.kind, vocab.tokenizer.to_str()).save(folder)
    (folder / "recipe.toml").write_text(settings.to_toml(), encoding="utf-8")


def problems(folder: Path) -> list[str]:
    """Return what is missing or wrong in the folder of a shipped model."""
    missing = [f"{name} is missing" for name in FILES if not (folder / name).is_file()]
    if missing:
        return missing
    text = (folder / TEXT_FILE).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ +(.+?) *$", text, re.M)
    found = [f"{TEXT_FILE} has no heading {x}" for x in HEADINGS if x not in headings]
    try:
        ShippedModel.verify(folder)
        model = ShippedModel(folder.name, 1, folder)
        for name in ("summary", "data", "licence", "metrics"):
            if not (value := model.card.get(name)) or "\n" in value:
                found.append(f"{CARD_FILE}: {name} is empty or more than a line")
        if not all(isinstance(x, float) for x in model.card["metrics"].values()):
            found.append(f"{CARD_FILE}: a figure of metrics must be a number")
        network, vocab = from_pretrained(folder)
        recipe = load_recipe(folder / "recipe.toml", is_stored=True)
        if not vocab.encode(recipe.generate.prompt):
            found.append("the prompt of the recipe is empty")
        if sum(x.numel() for x in network.parameters()) != model.n_parameters:
            found.append(f"{WEIGHTS_FILE} has other parameters than the model")
    except (OSError, RuntimeError, ValueError) as error:
        return [*found, str(error)]
    with safe_open(folder / WEIGHTS_FILE, "numpy") as file:
        names = [*file.keys()]
        if any(file.get_slice(name).get_dtype() != "BF16" for name in names):
            found.append(f"{WEIGHTS_FILE} is not in bfloat16")
    for path in (TEXT_FILE, CARD_FILE, "recipe.toml", CONFIG_FILE):
        content = (folder / path).read_text(encoding="utf-8")
        if own := re.search(r"(?<![\w.:/])/(?:home|root|work|tmp|Users)/\S*", content):
            found.append(f"{path} names a path of one machine: {own[0]}")
    return found


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("name", nargs="?")
    parser.add_argument("version", type=int, nargs="?")
    parser.add_argument("--card", type=Path, help="README.md of the folder")
    parser.add_argument("--about", type=Path, help="model.toml of the folder")
    parser.add_argument("--recipe", type=Path, help="instead of the recipe of the run")
    parser.add_argument("--check", action="store_true", help="check what is there")
    given = parser.parse_args()
    require_own_package()
    if not given.check:
        if None in (given.run, given.name, given.version, given.card, given.about):
            parser.error("give RUN NAME VERSION --card FILE --about FILE, or --check")
        print(ship(given.run, given.name, given.version, given.card, given.about, given.recipe))
    # Also those that are too incomplete to be taken for models.
    folders = (x for x in files.SHIPPED.iterdir() if x.is_dir() and not x.name.startswith("."))
    found = {folder.name: problems(folder) for folder in sorted(folders)}
    for name, wrong in found.items():
        print(f"{name}: {'; '.join(wrong) or 'complete'}")
    size = sum(model.n_bytes for model in ShippedModel.all())
    print(f"{size:,} of {LARGEST:,} bytes")
    return int(any(found.values()) or size > LARGEST)


if __name__ == "__main__":
    sys.exit(main())
