"""The comparison with other compressors at the size of a test."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.data import train_vocab
from transformer_xl.model import TransformerXL

pytest.importorskip("constriction")
PROGRAMS = Path(__file__).parents[2] / "benchmarks"
TEXT = b"a rose is a rose, " * 40


@pytest.mark.usefixtures("one_thread")
def test_bytes_and_bits_of_every_way_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    config = ModelConfig(
        vocab_size=256, n_layer=1, n_head=2, d_model=8, d_inner=8, mem_len=4, dropout=0.0
    )
    model = TransformerXL(config)
    with torch.no_grad():
        model.softmax.bias[[*TEXT]] += 5.0
    model.save_pretrained(tmp_path, train_vocab("bytes", []))
    (tmp_path / "text").write_bytes(b"skipped" + TEXT + b"left")
    files = ["--files", str(tmp_path / "text"), "--skip", "7", "--bytes", str(len(TEXT))]
    ours = ["--model", str(tmp_path), "--learn", "--lr", "0.001", "--streams", "20"]
    monkeypatch.setattr(sys, "argv", ["x", *files, *ours, "--out", str(tmp_path / "out.json")])
    import_module("compressing").main()

    rows = {row["name"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert {"xz -9e", "bzip2 -9", "txl", "txl --learn"} <= rows.keys()
    assert all(row["size"] == len(TEXT) for row in rows.values())
    row = rows["txl"]
    assert row["bits_per_byte"] == 8 * row["bytes"] / len(TEXT)
    assert row["loss_bits_per_byte"] == pytest.approx(row["model_bits_per_byte"], rel=1e-6)
    assert capsys.readouterr().out.count("| text |") == len(rows)
