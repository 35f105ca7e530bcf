"""The Python of the page on common tasks runs, block after block, as a reader would."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_page_on_common_tasks_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    assert len(blocks) == PAGE.read_text("utf-8").count("```python")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    n_threads = torch.get_num_threads()
    # On a busy machine, threads wait for each other longer than such models take to compute.
    torch.set_num_threads(1)
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        torch.set_num_threads(n_threads)
    # It has learned something, and writes.
    assert names["loss"].isfinite()
    assert len(names["texts"]) == 3
    assert all(len(text) > 30 for text in names["texts"])
    assert (tmp_path / "models" / "tuned" / "model.safetensors").is_file()
