"""What a folder from elsewhere would take to load is computed first, and refused above a limit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import transformer_xl as txl
from transformer_xl.config import ModelConfig
from transformer_xl.model import language_model, limits
from transformer_xl.model.language_model import load_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = ModelConfig(vocab_size=5, n_layer=1, n_head=1, d_model=2, d_inner=2, mem_len=4)
    txl.TransformerXL(config).save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, **settings: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_thousands_of_layers_of_nearly_nothing_are_refused_before_they_are_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_MOST_SECONDS", 1)
    monkeypatch.setattr(language_model, "build_model", None)
    change(folder, n_layer=10_000)
    save_file({f"t{i}": torch.zeros(0) for i in range(10_000)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"n_layer=10000.* the limit is 1 s: --any_size"):
        load_model(folder)


def test_the_limit_is_lifted_by_a_flag(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_MOST_SECONDS", 1e-6)
    with pytest.raises(ValueError, match="--any_size loads it all the same"):
        load_model(folder)
    with limits.any_size():
        load_model(folder)
    with pytest.raises(ValueError, match="--any_size"):
        load_model(folder)


def test_a_file_larger_than_the_memory_is_refused_unread(folder: Path) -> None:
    path = folder / "model.safetensors"
    content, size = path.read_bytes(), 1 << 42
    n = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n])
    end = max(x["data_offsets"][1] for x in header.values() if "data_offsets" in x)
    header["more"] = {"dtype": "F32", "shape": [size // 4], "data_offsets": [end, end + size]}
    head = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head + content[8 + n :])
        try:
            file.truncate(8 + len(head) + end + size)
        except OSError:
            pytest.skip("no file system for four terabytes of nothing")
    # The system may refuse to map it, or the limit to load it.
    too_large = r"to load .* would take at least 4\.4 TB|more than this machine can map"
    with pytest.raises((ValueError, RuntimeError), match=too_large):
        load_model(folder)
