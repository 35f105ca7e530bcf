"""One folder for both loaders."""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import transformer_xl as txl
from transformer_xl.inference.generate import Sampling
from transformer_xl.model import TransformerXL

KINDS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "adaptive, tied": {"cutoffs": (5, 10), "div_val": 2, "d_embed": 8, "tie_projections": True},
    "adaptive, in part": {"cutoffs": (5,), "div_val": 2, "tie_projections": (False, True)},
    "projected": {
        "d_embed": 8,
        "tie_projections": True,
        "norm_first": True,
        "quirks": ("raw_queries",),
    },
    "untied": {"tie_embeddings": False},
    "LSTM": {"kind": "lstm", "n_head": 8, "d_inner": 2048},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_goes_there_and_back(transformers, any_folder, tmp_path, kind):
    own, folder = any_folder(**KINDS[kind])
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs.save_pretrained(tmp_path / "back")
    # Byte for byte: each weight once, under the name that it had.
    first, second = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "back"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert TransformerXL.from_pretrained(tmp_path / "back").config == own.config
    # What was tied is one tensor again.
    names = [len({*map(id, model.parameters())}) for model in (theirs.transformer, own)]
    assert names[0] == names[1]


def test_what_else_the_settings_file_says_is_kept(transformers, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    content = json.loads(path.read_text()) | {"origin": {"from": "x"}, "eval": {"mem_len": 9}}
    path.write_text(json.dumps(content))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "old", num_labels=3, segment_len=7)
    config.save_pretrained(tmp_path / "new")
    again = transformers.AutoConfig.from_pretrained(tmp_path / "new")
    assert (again.num_labels, again.segment_len, again.eval) == (3, 7, {"mem_len": 9})
    assert again.hidden_size == again.d_model == 16
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert {*written} - {*content} == {"transformers"}
    assert all(written[name] == content[name] for name in content)


def test_settings_may_be_changed_while_loading(transformers, folder, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, mem_len=9, attn_len=4)
    assert (model.transformer.config.mem_len, model.transformer.config.attn_len) == (9, 4)
    with pytest.raises(ValueError, match="mem_len=-1"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, mem_len=-1)
    # One that is changed later changes no result, and is not written either.
    model.config.mem_len = 2
    with pytest.raises(ValueError, match=r"settings of model\.config were changed .*: change"):
        model.save_pretrained(tmp_path / "changed")
    assert not (tmp_path / "changed").exists()
    half = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
    assert half.transformer.dtype == torch.bfloat16
    assert half.generate(torch.tensor([[1, 2]]), max_new_tokens=3, pad_token_id=0).shape == (1, 5)


def test_pipelines_write_one_text_and_many(transformers, folder, model, texts):
    vocab = txl.load_vocab(folder)
    writer = transformers.pipeline("text-generation", model=str(folder))
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = [
        text
        + vocab.decode(
            [*txl.generate(model, vocab.encode(text), length=8, sampling=Sampling(temperature=0))]
        )
        for text in texts
    ]
    assert writer(texts[0], **settings)[0]["generated_text"] == expected[0]
    many = writer(texts, batch_size=3, **settings)
    assert [each[0]["generated_text"] for each in many] == expected
    new = writer(texts[1], return_full_text=False, num_beams=2, **settings)
    assert not new[0]["generated_text"].startswith(texts[1])
