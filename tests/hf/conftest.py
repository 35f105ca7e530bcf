"""A small model that has learned something, in a folder; transformers without a network."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.data.vocab import Vocab
from transformer_xl.model import TransformerXL, build_model

# Read when huggingface_hub is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    # On a busy machine, threads wait for each other longer than such models take to compute.
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="session", autouse=True)
def transformers() -> Any:
    """The library, after it was told of our models."""
    library = pytest.importorskip("transformers", reason="needs pip install 'transformer-xl[hf]'")
    import_module("transformer_xl.hf")
    library.utils.logging.disable_progress_bar()
    return library


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    # Trainer empties the caches of all devices, and looks through all objects for that: half a
    # second for each training.
    if find_spec("accelerate"):
        monkeypatch.setattr("accelerate.utils.memory.clear_device_cache", lambda **how: None)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Prompts of four lengths."""
    return ["the cat saw a dog and ran", "dog", "a dog ran to the s", "cat and dog"]


@pytest.fixture(scope="session")
def text(toy_text: Path) -> str:
    return toy_text.read_text()


@pytest.fixture(scope="session")
def vocab(text: str) -> Vocab:
    return train_vocab("chars", [text])


@pytest.fixture(scope="session")
def config(vocab: Vocab) -> ModelConfig:
    return ModelConfig(
        vocab_size=len(vocab), n_layer=2, n_head=2, d_model=16, d_inner=32, mem_len=64, dropout=0.0
    )


@pytest.fixture(scope="session")
def model(config: ModelConfig, vocab: Vocab, text: str) -> TransformerXL:
    """Trained for a second: what it writes depends on what it has read."""
    torch.manual_seed(0)
    model = TransformerXL(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    streams = torch.tensor(vocab.encode(text))[: 8 * 400].view(8, -1)
    mems = None
    for step in range(100):
        start = step * 32 % (streams.shape[1] - 33)
        segment = streams[:, start : start + 33]
        out = model(segment[:, :-1], mems, segment[:, 1:])
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        mems = out.mems
    return model.eval()


@pytest.fixture(scope="session")
def folder(model: TransformerXL, vocab: Vocab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    model.save_pretrained(folder, vocab)
    return folder


@pytest.fixture
def any_folder(
    config: ModelConfig, vocab: Vocab, tmp_path: Path
) -> Callable[..., tuple[TransformerXL, Path]]:
    """Makes a model of any settings, with weights of some size, and its folder."""

    def make(**settings: Any) -> tuple[TransformerXL, Path]:
        torch.manual_seed(2)
        model = build_model(replace(config, **settings)).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.5)
        folder = tmp_path / "any"
        model.save_pretrained(folder, vocab)
        return model, folder

    return make


@pytest.fixture(scope="session")
def language_model(transformers: Any, folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizer(transformers: Any, folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)
