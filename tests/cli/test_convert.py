import shutil

import pytest
import torch

from transformer_xl import TransformerXL
from transformer_xl.config import ModelConfig
from transformer_xl.interop.convert.layouts import entries


def test_an_old_checkpoint_becomes_a_model_that_every_command_takes(txl, shared, tmp_path):
    theirs = tmp_path / "theirs"
    config = ModelConfig(
        vocab_size=1091,
        n_layer=1,
        n_head=2,
        d_model=16,
        d_inner=32,
        mem_len=8,
        cutoffs=(100, 400),
        div_val=2,
    )
    weights = TransformerXL(config).state_dict()
    table = entries(config, clusters="reversed", biases_in_layers=False)
    theirs.mkdir()
    torch.save({x.theirs: weights[x.ours][x.part] for x in table}, theirs / "state_dict.pt")
    for name in ("vocab.pkl", "tokenizer_config.json", "added_tokens.json"):
        shutil.copy(shared / "goldens/hf_tokenizer" / name, theirs)
    lengths = ("--mem_len", 8, "--pre_lnorm", False)
    ended = txl("convert", theirs / "state_dict.pt", tmp_path / "model", *lengths, "--json")
    assert ended.code == 0
    assert ended.json["cutoffs"] == [100, 400]
    assert "parameters" in ended.err

    text = tmp_path / "text.txt"
    text.write_text("First Citizen :\nwe are all resolved rather to die\n")
    ended = txl("eval", tmp_path / "model", "--file", text, "--json")
    # Each of the two lines ends in <eos>.
    assert ended.json["tokens"] == 3 + 7 + 2 - 1
    assert len(txl("score", tmp_path / "model", text).out.splitlines()) == 12
    ended = txl(
        "generate", tmp_path / "model", "--prompt", "First Citizen", "--length", 5, "--json"
    )
    assert ended.json["text"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.pt", "missing.pt does not exist: give a checkpoint or its folder"),
        ("malicious_model.pt", "the file names posix.system"),
    ],
)
def test_what_cannot_be_converted_is_said(txl, shared, tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    ended = txl("convert", shared / "goldens/security" / source, "out")
    assert (ended.code, ended.out) == (1, "")
    assert message in ended.err
    assert not [*tmp_path.iterdir()]
