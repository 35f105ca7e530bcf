"""A folder with its own code, on a machine without this package."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import transformer_xl as txl
from transformer_xl.data.vocab import Vocab
from transformer_xl.inference.generate import Sampling
from transformer_xl.model import TransformerXL

pytestmark = pytest.mark.slow

# This package, and everything that is not there with transformers.
PROBE = """
import json, sys

class Missing:
    def find_spec(self, name, *rest):
        if name.split(".")[0] in ("transformer_xl", "jaxtyping", "msgspec", "tyro"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Missing())
import warnings
warnings.simplefilter("error")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
found = {}
for name in sys.argv[1:4]:
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    batch = tokenizer(["the cat saw", "dog"], padding=True, return_tensors="pt")
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    written = model.generate(**batch, **settings)
    found[name] = tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :])
write = pipeline("text-generation", model=sys.argv[1], trust_remote_code=True)
found["pipeline"] = write("the cat saw", **settings)[0]["generated_text"]
found["plain"] = []
for name in sys.argv[1:4]:
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    package = type(model.transformer).__module__.rpartition(".")[0]
    calling = sys.modules[f"{package}.transformer_xl_model_calling"]
    found["plain"].append(calling.first_wrapped(model.transformer) is None)
    size = model.config.vocab_size + 2
    model.resize_token_embeddings(size)
    found["plain"].append(model(**batch).logits.shape[-1] == size)
model = AutoModelForCausalLM.from_pretrained(sys.argv[3], trust_remote_code=True)
model.save_pretrained(sys.argv[4])
tokenizer.save_pretrained(sys.argv[4])
again = AutoModelForCausalLM.from_pretrained(sys.argv[4], trust_remote_code=True)
found["again"] = torch.equal(again.generate(**batch, **settings), written)
found["from"] = type(again).__module__.split(".")[0]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_packaged_folder_works_without_this_package(
    language_model: Any,
    tokenizer: Any,
    transformers: Any,
    any_folder: Callable[..., tuple[TransformerXL, Path]],
    vocab: Vocab,
    tmp_path: Path,
) -> None:
    from transformer_xl.hf import save_with_code

    models = [language_model]
    for settings in (
        {"cutoffs": (5,), "div_val": 2, "norm": "rms", "activation": "swiglu"},
        {"kind": "lstm", "n_head": 8, "d_inner": 2048},
    ):
        models.append(transformers.AutoModelForCausalLM.from_pretrained(any_folder(**settings)[1]))
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder, model in zip(folders, models, strict=True):
        save_with_code(folder, model, tokenizer)
    environment = os.environ | {
        "HF_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        # From a folder in which this package cannot be found.
        "PYTHONPATH": "",
    }
    result = subprocess.run(
        [sys.executable, "-c", PROBE, *map(str, folders), str(tmp_path / "again")],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    for folder, model in zip(folders, models, strict=True):
        own = TransformerXL.from_pretrained(folder)
        assert all(map(torch.equal, own.parameters(), model.transformer.parameters()))
        expected = [
            vocab.decode(
                [*txl.generate(own, vocab.encode(text), length=8, sampling=Sampling(temperature=0))]
            )
            for text in ("the cat saw", "dog")
        ]
        assert found[str(folder)] == expected
        if model is language_model:
            assert found["pipeline"] == "the cat saw" + expected[0]
    # Nothing counts as wrapped or hooked, which would have to be called for each token.
    assert all(found["plain"])
    assert found["again"]
    assert found["from"] == "transformers_modules"


def test_the_files_are_ours_with_other_imports() -> None:
    from transformer_xl.interop.hf.packaging import sources

    files = sources()
    assert {
        "transformer_xl_model_transformer_xl.py",
        "transformer_xl_ops_triton_forward.py",
    } <= files.keys()
    others = "_(train|inference|apps|studies|cli|convert)_"
    assert not {name for name in files if re.search(others, name)}
    for name, text in files.items():
        compile(text, name, "exec")
        assert not re.search(r"^\s*(from|import) (transformer_xl|jaxtyping)\b", text, re.M), name
        # Whatever is imported from a neighbour is there.
        needed = re.findall(r"^\s*from \.(\w+) import", text, re.M)
        assert {f"{module}.py" for module in needed} <= files.keys(), name


def test_without_code_a_folder_is_not_of_a_type_that_transformers_knows(
    language_model: Any, tmp_path: Path
) -> None:
    language_model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert "auto_map" not in content
    assert not [*tmp_path.glob("*.py")]


@pytest.fixture(autouse=True)
def _no_tokenizer_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
