"""What all tests share: fixed seeds, tiny settings, and where the real texts are."""

import os
import random
import re
import shutil
import signal
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformer_xl.config import Config, ModelConfig

# No test asks the Hugging Face hub; read when huggingface_hub is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

if "TXL_CHECK_SIGNATURES" in os.environ:
    from jaxtyping import install_import_hook

    # Before anything imports these packages. With is_pep484_tower an int is valid where a float is
    # annotated, as everywhere in Python.
    install_import_hook(
        [f"transformer_xl.{name}" for name in ("ops", "model", "inference", "train")],
        "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
    )

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("TXL_SHARED", ROOT.parent / "shared"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly", action="store_true", help="kills, mutated files and requests in full numbers"
    )


def pytest_configure() -> None:
    # What starts the tests in the background may have Ctrl-C ignored, which processes inherit.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _can_compile() -> bool:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return bool(compiler) and Path(sysconfig.get_path("include"), "Python.h").is_file()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    # Left out, not skipped: tests for a GPU are a quarter of the items of some files.
    left_out = {"gpu"} if not torch.cuda.is_available() else set()
    left_out |= {"nightly"} if not config.getoption("nightly") else set()
    is_left_out = [any(map(item.get_closest_marker, left_out)) for item in items]
    config.hook.pytest_deselected(items=[*compress(items, is_left_out)])
    items[:] = [item for item, out in zip(items, is_left_out, strict=True) if not out]


def pytest_runtest_setup(item: pytest.Item) -> None:
    import torch

    if item.get_closest_marker("compile"):
        if not _can_compile():
            pytest.skip("torch.compile needs a C++ compiler (CXX, or g++) and headers of Python")
        # Tests before it have compiled the same functions, of which torch keeps eight variants.
        torch.compiler.reset()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    """The CPU, and a GPU where there is one."""
    import torch

    return torch.device(request.param)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> Any:
    """The device of the Triton kernels: a GPU, or the CPU in Triton's interpreter."""
    import torch

    if find_spec("triton") is None:
        pytest.skip("needs Triton: pip install triton, in the version that belongs to the PyTorch")
    from triton import knobs

    if knobs.runtime.interpret == (request.param == "cuda"):
        pytest.skip("runs in Triton's interpreter with TRITON_INTERPRET=1, on a GPU without it")
    return torch.device("cpu" if request.param == "interpreter" else "cuda")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real texts and golden outputs, which are too large for the repository."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the folder {SHARED} (set TXL_SHARED to it)")
    return SHARED


@pytest.fixture(scope="session")
def is_nightly(pytestconfig: pytest.Config) -> bool:
    """Whether what is tried at random is tried in full numbers, or for seconds."""
    return pytestconfig.getoption("nightly")


@pytest.fixture
def quick_compiler(is_nightly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By day torch.compile traces and differentiates, but translates nothing to C++ (a minute)."""
    import torch

    if not is_nightly:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.fixture(autouse=True, scope="session")
def _unsynced() -> Iterator[None]:
    # Nothing here has to outlast a power cut, and waiting for the disk is a quarter of many a test.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _parsers_once() -> Iterator[None]:
    # The parser of a command is made once, which takes longer than most commands of tests.
    try:
        from tyro._parsers import ParserSpecification
    except ImportError:
        # A machine that tests kernels has no tyro; another version of tyro may be built otherwise.
        yield
        return
    from transformer_xl.cli import commands

    make, made = ParserSpecification.from_callable_or_type, {}

    def once(f: Any, **about: Any) -> Any:
        if getattr(f, "__origin__", f) not in commands().values():
            return make(f, **about)
        if (key := (f, repr(about))) not in made:
            made[key] = make(f, **about)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParserSpecification, "from_callable_or_type", staticmethod(once))
        yield


@pytest.fixture(autouse=True, scope="session")
def plain_reports() -> Iterator[Callable[..., str]]:
    """Runs write no figures, half of a toy training.

    Yields the function that draws figures.
    """
    from transformer_xl.train import figures

    draws = figures.as_svg
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "as_svg", lambda *about, **more: "<svg></svg>")
        yield draws


@pytest.fixture
def whole_reports(plain_reports: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write their figures."""
    from transformer_xl.train import figures

    monkeypatch.setattr(figures, "as_svg", plain_reports)


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # No test reads or writes the token files of whoever runs it, nor what torch has compiled for
    # other instructions.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TXL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.fixture
def tiny_config() -> "ModelConfig":
    """A model that computes in milliseconds and has every part; no two widths are equal."""
    from transformer_xl.config import ModelConfig

    return ModelConfig(
        vocab_size=31, n_layer=3, n_head=2, d_model=16, d_inner=32, mem_len=5, dropout=0.0
    )


@pytest.fixture(scope="session")
def of_kind() -> Callable[..., "ModelConfig"]:
    """Makes settings of another kind of others, without the sizes that it does not have."""

    def make(config: "ModelConfig", kind: str, **settings: Any) -> "ModelConfig":
        own = {"n_head": 8, "d_inner": 2048, "attn_dropout": 0.0} if kind == "lstm" else {}
        return replace(config, kind=kind, **own, **settings)

    return make


@pytest.fixture(scope="session")
def toy_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 4,000 characters in which there is something to learn."""
    words = ("the", "cat", "saw", "a", "dog", "and", "ran", "to", "sea")
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("toy") / "toy.txt"
    lines = (" ".join(draw.choices(words, k=8)) for _ in range(150))
    path.write_text("".join(f"{line}.\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def toy_recipe(toy_text: Path) -> Callable[..., "Config"]:
    """Makes recipes that train in half a second: `toy_recipe(train={"steps": 3})`."""
    from transformer_xl.config import (
        Config,
        DataConfig,
        EvalConfig,
        GenerateConfig,
        ModelConfig,
        TrainConfig,
    )

    config = Config(
        model=ModelConfig(
            n_layer=2, n_head=2, d_model=16, d_inner=32, mem_len=8, dropout=0.1, attn_dropout=0.1
        ),
        data=DataConfig(path=str(toy_text), vocab="chars"),
        train=TrainConfig(
            steps=12,
            batch_size=4,
            segment_len=8,
            accumulate=2,
            lr=1e-2,
            log_every=2,
            eval_every=4,
            save_every=3,
            # The same numbers on every machine.
            precision="float32",
        ),
        eval=EvalConfig(segment_len=64),
        generate=GenerateConfig(length=20),
    )

    def make(**sections: dict[str, Any]) -> Config:
        changed = {name: replace(getattr(config, name), **sections[name]) for name in sections}
        return replace(config, **changed)

    return make


CARD = """# A model of a test

## Data
Words that are drawn.
## Licence
CC0-1.0
## Revision
None.
## Command
`txl train toy.toml --out runs/toy`
## Hardware
None.
## Hours
0
## Figures
None.
## Limits
It knows nothing.
"""
ABOUT = """
summary = "{summary}"
data = "words that are drawn"
licence = "CC0-1.0 (weights and data)"
[metrics]
"bits per byte on nothing" = 8.0
"""


@pytest.fixture(scope="session")
def shipping() -> Any:
    """The program that writes models into the package."""
    path = ROOT / "scripts" / "pretrained" / "shipping.py"
    spec = spec_from_file_location("shipping", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def shipped_root(
    tmp_path_factory: pytest.TempPathFactory,
    shipping: Any,
    toy_recipe: Callable[..., "Config"],
    toy_text: Path,
) -> Path:
    """A folder of shipped models: ``toy`` of characters, and two versions of ``notes`` of bytes.

    Nobody has trained them; ``notes`` expects the bytes of a phrase.
    """
    import torch

    from transformer_xl.config import files
    from transformer_xl.data import train_vocab
    from transformer_xl.model import build_model

    root, work = tmp_path_factory.mktemp("shipped"), tmp_path_factory.mktemp("made")
    (work / "card.md").write_text(CARD)
    for name, number, kind in (("toy", 1, "chars"), ("notes", 1, "bytes"), ("notes", 2, "bytes")):
        vocab = train_vocab(kind, [toy_text.read_text()] if kind == "chars" else [])
        config = toy_recipe(
            model={"vocab_size": len(vocab)},
            data={"path": "toy.txt", "vocab": kind},
            generate={"prompt": "the ", "length": 9, "temperature": 0.5},
        )
        torch.manual_seed(number)
        model = build_model(config.model)
        if kind == "bytes":
            with torch.no_grad():
                model.softmax.bias[[*b"so it goes, "]] += 6.0
        run = work / f"{name}-{number}"
        model.save_pretrained(run, vocab)
        (work / "recipe.toml").write_text(config.to_toml())
        (work / "model.toml").write_text(ABOUT.format(summary=f"writes like {name}"))
        given = work / "card.md", work / "model.toml", work / "recipe.toml"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "SHIPPED", root)
            shipping.ship(run, name, number, *given)
    return root


@pytest.fixture
def shipped(shipped_root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The models of ``shipped_root`` in place of those of the package; an empty working folder."""
    from transformer_xl.config import files

    monkeypatch.setattr(files, "SHIPPED", shipped_root)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return shipped_root


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For training tiny models, for which threads wait longer than they compute."""
    import torch

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture
def refused() -> Callable[[str], AbstractContextManager[None]]:
    """Checks that a call is refused: `with refused("length=1.5 must be an integer")`.

    The check of types in signatures, where it is on, comes first and has words of its own.
    """
    from jaxtyping import TypeCheckError

    @contextmanager
    def check(message: str) -> Iterator[None]:
        with pytest.raises((ValueError, TypeCheckError)) as found:
            yield
        is_ours = not isinstance(found.value, TypeCheckError)
        assert not is_ours or re.search(message, str(found.value)), found.value

    return check
