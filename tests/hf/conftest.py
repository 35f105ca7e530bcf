"""A small model that has learned something, in a folder; transformers without a network."""

import os
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.model import TransformerXL, build_model

# Read when huggingface_hub is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    # On a busy machine, threads wait for each other longer than such models take to compute.
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="session", autouse=True)
def transformers():
    """The library, after it was told of our models."""
    library = pytest.importorskip("transformers", reason="needs pip install 'transformer-xl[hf]'")
    import_module("transformer_xl.hf")
    library.utils.logging.disable_progress_bar()
    return library


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    # Trainer empties the caches of all devices, and looks through all objects for that: half a
    # second for each training.
    if find_spec("accelerate"):
        monkeypatch.setattr("accelerate.utils.memory.clear_device_cache", lambda **how: None)


@pytest.fixture(scope="session")
def texts():
    """Prompts of four lengths."""
    return ["the cat saw a dog and ran", "dog", "a dog ran to the s", "cat and dog"]


@pytest.fixture(scope="session")
def text(toy_text):
    return toy_text.read_text()


@pytest.fixture(scope="session")
def vocab(text):
    return train_vocab("chars", [text])


@pytest.fixture(scope="session")
def config(vocab):
    return ModelConfig(
        vocab_size=len(vocab), n_layer=2, n_head=2, d_model=16, d_inner=32, mem_len=64, dropout=0.0
    )


@pytest.fixture(scope="session")
def model(config, vocab, text):
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
def folder(model, vocab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    model.save_pretrained(folder, vocab)
    return folder


@pytest.fixture
def any_folder(config, vocab, tmp_path):
    """Makes a model of any settings, with weights of some size, and its folder."""

    def make(**settings):
        torch.manual_seed(2)
        model = build_model(replace(config, **settings)).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.5)
        folder = tmp_path / "any"
        model.save_pretrained(folder, vocab)
        return model, folder

    return make


@pytest.fixture(scope="session")
def language_model(transformers, folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizer(transformers, folder):
    return transformers.AutoTokenizer.from_pretrained(folder)
