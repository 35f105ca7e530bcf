"""The Python of the page on transformers runs, block after block, as a reader would."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_the_page_on_transformers_runs(transformers, folder, tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    pytest.importorskip("peft", reason="adapters need peft")
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    assert len(blocks) == 8
    # The words of the toy text instead of Python, which its vocabulary does not know.
    words = {
        "import os": "the cat",
        "import sys": "a dog",
        "def main() -> None:": "a dog ran",
        "def main():": "a dog ran",
        "def __init__(self, name: str": "the cat saw",
        "pass\\n": "sea\\n",
        # Its letters are not all of those by which transformers finds stop strings.
        'stop_strings=["\\n\\n"],': 'eos_token_id=tokenizer.convert_tokens_to_ids("\\n"),',
    }
    shutil.copytree(folder, tmp_path / "runs" / "demo" / "model" / "best")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        for code, word in words.items():
            block = block.replace(code, word)
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["memory"].get_seq_length() == len("the cat\n") + 19
    assert names["more"].shape[1] == 21
    assert names["stopped"].shape[1] <= len("the cat\n") + 40
    assert (tmp_path / "runs" / "tuned" / "checkpoint-2" / "model.safetensors").is_file()
    assert (tmp_path / "runs" / "adapter" / "adapter_model.safetensors").is_file()
