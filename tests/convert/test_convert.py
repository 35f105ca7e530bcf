import json
import os
import shutil
from dataclasses import replace
from importlib import import_module

import pytest
import torch

import transformer_xl as txl
from transformer_xl.config import EvalConfig
from transformer_xl.errors import CheckpointError, SettingsError
from transformer_xl.model.pretrained import ModelFolder


def test_weights_in_double_precision_are_rounded(shared, tmp_path):
    def widen(state):
        state |= {name: x.double() for name, x in state.items()}

    source = spoiled(shared / "goldens/pt_01_base", tmp_path, widen)
    said = []
    txl.convert(source, tmp_path / "out", say=said.append)
    assert any("float64 weights are rounded to float32" in text for text in said)
    txl.convert(shared / "goldens/pt_01_base/state_dict.pt", tmp_path / "single", say=said.append)
    assert sum("rounded" in text for text in said) == 1
    ours, theirs = (txl.TransformerXL.from_pretrained(tmp_path / x) for x in ("out", "single"))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_files_that_contain_themselves_end_in_the_one_error(tmp_path):
    content = {}
    content["model"] = content
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="nested without end"):
        txl.convert(tmp_path / "model.pt", tmp_path / "out")


def test_settings_that_are_no_small_file_are_refused(shared, tmp_path):
    source = spoiled(shared / "goldens/pt_01_base", tmp_path, lambda state: None)
    settings = tmp_path / "config.json"
    with settings.open("wb") as file:
        file.truncate(5 << 20)
    with pytest.raises(CheckpointError, match=r"config.json has more than 4,194,304 bytes"):
        txl.convert(source, tmp_path / "out")


def bare(shared, tmp_path, name="pt_01_base"):
    """A state dict with nothing beside it."""
    return shutil.copy(shared / "goldens" / name / "state_dict.pt", tmp_path / "weights.pt")


def test_what_a_state_dict_does_not_say_is_asked_for(shared, tmp_path):
    source = bare(shared, tmp_path)
    with pytest.raises(ValueError, match=r"does not say mem_len.* give --mem_len"):
        txl.convert(source, tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"does not say pre_lnorm.* give --pre_lnorm True or False"
    ):
        txl.convert(source, tmp_path / "out", settings={"mem_len": 9})
    assert not (tmp_path / "out").exists()
    txl.convert(source, tmp_path / "out", settings={"mem_len": 9, "pre_lnorm": False})
    txl.convert(shared / "goldens/pt_01_base/model.pt", tmp_path / "module")
    ours, theirs = (txl.TransformerXL.from_pretrained(tmp_path / x) for x in ("out", "module"))
    assert replace(ours.config, dropout=0.1, attn_dropout=0.05) == theirs.config


def test_a_segment_length_that_is_given_is_that_of_the_evaluation(shared, tmp_path, monkeypatch):
    source, given = bare(shared, tmp_path), {"mem_len": 9, "pre_lnorm": False, "tgt_len": 70}
    txl.convert(source, tmp_path / "plain", settings=given)
    assert ModelFolder(tmp_path / "plain").read_eval_config().segment_len == 70
    # As if it had the sizes of a published model.
    known = EvalConfig(split="test", segment_len=80, mem_len=2100)
    name = "published_evaluation"
    module = import_module("transformer_xl.interop.convert")
    monkeypatch.setattr(module, name, lambda config, *, is_pytorch: ("enwik8-base", known))
    said = []
    txl.convert(source, tmp_path / "known", settings=given, say=said.append)
    found = ModelFolder(tmp_path / "known").read_eval_config()
    assert (found.segment_len, found.mem_len) == (70, 2100)
    assert any("enwik8-base" in text and "segments of 70 tokens" in text for text in said)
    del given["tgt_len"]
    txl.convert(source, tmp_path / "published", settings=given)
    assert ModelFolder(tmp_path / "published").read_eval_config().segment_len == 80


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mem_len": -1}, "mem_len=-1 must be at least 0"),
        ({"mem_len": 1 << 40}, r"<= 16777216 - at `\$\.mem_len`"),
        ({"mem_len": "many"}, "Expected `int.*got `str`"),
        ({"tgt_len": "150"}, r"Expected `int.*at `\$\.tgt_len`"),
        ({"same_length": 7}, r"at `\$\.same_length`"),
        ({"n_heads": 3}, "settings has 'n_heads'"),
        ({"n_head": 0}, "^n_head=0, but the tensors of the checkpoint say 3"),
        ({"n_head": 5}, "n_head=5, but the tensors of the checkpoint say 3"),
        ({"layer_norm_epsilon": "small"}, "Expected `float.*got `str`"),
        ({"mem_len": 0, "same_length": True}, "hides every key"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(shared, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        txl.convert(shared / "goldens/pt_01_base/model.pt", tmp_path / "out", settings=settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("pt_12b_attn2_mem9", {"n_head": 0}, "^n_head=0 must divide the 24 rows of q_net"),
        ("pt_12b_attn2_mem9", {"n_head": 7}, "^n_head=7 must divide the 24 rows of q_net"),
        ("pt_03_adaptive_div1", {"cutoffs": [3]}, r"^cutoffs=\[3\] do not define the 3 clusters"),
    ],
)
def test_a_given_setting_that_does_not_fit_is_named(shared, tmp_path, name, changed, message):
    given = {"mem_len": 9, "pre_lnorm": False} | changed
    with pytest.raises(SettingsError, match=message):
        txl.convert(bare(shared, tmp_path, name), tmp_path / "out", settings=given)


def test_a_folder_that_holds_something_is_left_alone(shared, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty: choose another folder"):
        txl.convert(shared / "goldens/pt_01_base/model.pt", tmp_path / "out")
    assert [x.name for x in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_vocabulary_that_is_no_file_is_refused(shared, tmp_path):
    source, pipe = shared / "goldens/pt_01_base/model.pt", tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="pipe is a named pipe"):
        txl.convert(source, tmp_path / "out", vocab=pipe)
    with pytest.raises(FileNotFoundError, match="none does not exist: give the file with the voc"):
        txl.convert(tmp_path / "no source", tmp_path / "out", vocab=tmp_path / "none")
    assert not (tmp_path / "out").exists()


def test_what_safetensors_says_of_a_damaged_file_is_told(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"x\.safetensors: .*SafetensorError: .*header"):
        txl.convert(tmp_path / "x.safetensors", tmp_path / "out")


def spoiled(folder, tmp_path, change):
    state = dict(torch.load(folder / "state_dict.pt", weights_only=True))
    change(state)
    torch.save(state, tmp_path / "state_dict.pt")
    shutil.copy(folder / "config.json", tmp_path)
    return tmp_path / "state_dict.pt"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("layers.1.pos_ff.CoreNet.3.bias"), "lacks layers.1.pos_ff.CoreNet.3.bias"),
        (lambda s: s.update(surprise=torch.zeros(2)), "holds surprise, which a model with"),
        (lambda s: s.update(r_w_bias=torch.zeros(3, 9)), "have the shape|d_head"),
        (lambda s: s.update({"layers.2.dec_attn.o_net.weight": torch.zeros(24, 23)}), "the shape"),
        (lambda s: s.update({"crit.out_layers.0.weight": torch.zeros(61, 24)}), "not the same as"),
        (lambda s: s.update(r_w_bias=torch.zeros(3, 8, dtype=torch.int64)), "real numbers"),
        (lambda s: s.clear(), "holds no Transformer-XL"),
        (lambda s: s.update(epoch=[3]), "holds 'epoch' of type list"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(shared, tmp_path, change, message):
    source = spoiled(shared / "goldens/pt_01_base", tmp_path, change)
    with pytest.raises(ValueError, match=message):
        txl.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_tensor_named_hundreds_of_times_takes_no_room(shared, tmp_path):
    def repeat(state):
        layer = {k: x for k, x in state.items() if k.startswith("layers.0.")}
        for n in range(3, 300):
            state.update({k.replace("layers.0.", f"layers.{n}."): x for k, x in layer.items()})

    source = spoiled(shared / "goldens/pt_01_base", tmp_path, repeat)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="weights: it is damaged"):
        txl.convert(source, tmp_path / "out", settings={"mem_len": 9, "pre_lnorm": False})


def test_how_a_model_is_evaluated_comes_with_it(shared, tmp_path):
    txl.convert(shared / "goldens/pt_09_mem20_tgt5/model.pt", tmp_path / "out")
    settings = ModelFolder(tmp_path / "out").read_eval_config()
    assert (settings.segment_len, settings.mem_len) == (5, None)
    about = json.loads((tmp_path / "out/config.json").read_text())["origin"]
    assert about["format"] == "authors"
    assert about["settings"]["mem_len"] == 20
