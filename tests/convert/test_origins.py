"""Checkpoints of each implementation, as far as no file of it is at hand."""

import json
import re
import shutil
from argparse import Namespace
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import transformer_xl as txl
from transformer_xl.interop.convert.layouts import entries, read_weights
from transformer_xl.interop.convert.old_checkpoints import from_tensorflow, open_checkpoint
from transformer_xl.interop.convert.old_settings import model_config
from transformer_xl.model import build_model


def save_model(config, folder):
    """Write one of our models with random weights; return its weights."""
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def nvidia_checkpoint(folder, tmp_path):
    """A checkpoint of the authors in the clothes of NVIDIA's."""
    state = torch.load(folder / "state_dict.pt", weights_only=True)
    arguments = json.loads((folder / "config.json").read_text())["model_kwargs"]
    theirs = OrderedDict()
    for name, x in state.items():
        if match := re.fullmatch(r"crit\.out_layers\.(\d+)\.bias", name):
            theirs[f"module.crit.out_layers_biases.{match[1]}"] = x
        elif not name.startswith("crit.out_layers"):
            theirs[f"module.{name}"] = x
        if match := re.fullmatch(r"word_emb\.emb_projs\.(\d+)", name):
            theirs[f"module.crit.shared_out_projs.{match[1]}"] = x
    content = {
        "args": Namespace(work_dir="LM-TFM", n_layer=99),
        "model_config": arguments | {"dtype": None, "same_length": True},
        "model_state": theirs,
        "optimizer_state": {"state": {0: {"exp_avg": torch.zeros(3)}}},
        "epoch": 1,
        "best_val_loss": 3.2,
    }
    torch.save(content, tmp_path / "checkpoint_best.pt")
    return tmp_path / "checkpoint_best.pt"


@pytest.mark.parametrize("name", ["pt_03_adaptive_div1", "pt_04_adaptive_div2"])
def test_a_checkpoint_of_nvidia_is_the_authors_model(shared, tmp_path, name):
    folder = shared / "goldens" / name
    txl.convert(nvidia_checkpoint(folder, tmp_path), tmp_path / "nvidia")
    txl.convert(folder / "model.pt", tmp_path / "authors")
    ours, theirs = (load_file(tmp_path / x / "model.safetensors") for x in ("nvidia", "authors"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    # Its mask shows one key more.
    assert txl.TransformerXL.from_pretrained(tmp_path / "nvidia").config.attn_len == 10


def renamed(config, weights, *, biases_in_layers):
    """Our weights by the names of Hugging Face's code."""
    table = entries(config, clusters="natural", biases_in_layers=biases_in_layers)
    return {entry.theirs: weights[entry.ours][entry.part] for entry in table}


@pytest.mark.parametrize("kept", ["layers.0.dec_attn.", "layers.2.dec_attn.", ""])
def test_a_shared_bias_of_hugging_face_may_have_any_of_its_names(tiny_config, tmp_path, kept):
    before = save_model(tiny_config, tmp_path / "ours")
    state = renamed(tiny_config, before, biases_in_layers=True)
    biases = {f"{kept}{name}" for name in ("r_w_bias", "r_r_bias")}
    left = {k: x for k, x in state.items() if k in biases or not k.endswith(("w_bias", "r_bias"))}
    assert len(left) == len(state) - 2 * tiny_config.n_layer
    (tmp_path / "theirs").mkdir()
    torch.save(
        {f"transformer.{name}": x for name, x in left.items()},
        tmp_path / "theirs/pytorch_model.bin",
    )
    settings = {"model_type": "transfo-xl", "mem_len": 6, "pre_lnorm": False, "untie_r": False}
    settings |= {name: getattr(tiny_config, name) for name in ("n_layer", "d_model")}
    (tmp_path / "theirs/config.json").write_text(json.dumps(settings))
    txl.convert(tmp_path / "theirs", tmp_path / "again")
    after = load_file(tmp_path / "again/model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


TENSORFLOW = {
    "enwik8": {"start_memory": "zeros", "tie_projections": True},
    "narrow": {"start_memory": "zeros", "tie_projections": True, "d_embed": 6},
    "base": {"cutoffs": (5, 12), "tie_biases": False, "start_memory": "zeros"},
    "base, narrow": {"cutoffs": (5, 12), "d_embed": 6, "tie_projections": (False, True, True)},
    "wt103": {"cutoffs": (5, 12), "div_val": 4, "tie_projections": (False, True, True)},
    "lm1b": {"cutoffs": (5, 12), "div_val": 4, "proj_same_dim": False, "tie_biases": False},
}


def tensorflow_variables(config, weights):
    """Our weights by TensorFlow's names."""
    variables = {}
    for name, x in renamed(config, weights, biases_in_layers=False).items():
        i = (re.search(r"\.(\d+)\b", name) or [""])[0].strip(".")
        scope = f"cutoff_{i}/" if config.div_val > 1 else ""
        for ours, theirs in (
            (r"word_emb\.emb_layers\.\d+\.weight", f"adaptive_embed/{scope}lookup_table"),
            (r"word_emb\.emb_projs\.\d+", f"adaptive_embed/{scope}proj_W"),
            (r"crit\.out_layers\.\d+\.bias", f"adaptive_softmax/cutoff_{i}/b"),
            (r"crit\.out_projs\.\d+", f"adaptive_softmax/cutoff_{i}/proj"),
            (r"crit\.cluster_weight", "adaptive_softmax/cutoff_0/cluster_W"),
            (r"crit\.cluster_bias", "adaptive_softmax/cutoff_0/cluster_b"),
            (r"layers\.\d+\.dec_attn\.(\w+)_net\.weight", rf"layer_{i}/rel_attn/\1/kernel"),
            (r"layers\.\d+\.dec_attn\.layer_norm\.weight", f"layer_{i}/rel_attn/LayerNorm/gamma"),
            (r"layers\.\d+\.dec_attn\.layer_norm\.bias", f"layer_{i}/rel_attn/LayerNorm/beta"),
            (r"layers\.\d+\.pos_ff\.CoreNet\.0\.weight", f"layer_{i}/ff/layer_1/kernel"),
            (r"layers\.\d+\.pos_ff\.CoreNet\.0\.bias", f"layer_{i}/ff/layer_1/bias"),
            (r"layers\.\d+\.pos_ff\.CoreNet\.3\.weight", f"layer_{i}/ff/layer_2/kernel"),
            (r"layers\.\d+\.pos_ff\.CoreNet\.3\.bias", f"layer_{i}/ff/layer_2/bias"),
            (r"layers\.\d+\.pos_ff\.layer_norm\.weight", f"layer_{i}/ff/LayerNorm/gamma"),
            (r"layers\.\d+\.pos_ff\.layer_norm\.bias", f"layer_{i}/ff/LayerNorm/beta"),
            (r"(r_w_bias|r_r_bias)", r"\1"),
        ):
            if match := re.fullmatch(ours, name):
                turned = x.T if theirs.endswith(("kernel", "proj", "proj_W")) else x
                variables["transformer/" + match.expand(theirs)] = turned
    tied = [f"proj{i}" for i, c in enumerate(config.clusters) if c.ties_proj]
    for i in (name.removeprefix("proj") for name in tied):
        variables.pop(f"transformer/adaptive_softmax/cutoff_{i}/proj")
    bias = variables.get("transformer/adaptive_softmax/cutoff_0/b")
    if not config.cutoffs:
        variables["transformer/adaptive_softmax/bias"] = bias
        del variables["transformer/adaptive_softmax/cutoff_0/b"]
    elif config.div_val == 1:
        for i, cluster in enumerate(config.clusters):
            own = bias[cluster.start : cluster.stop]
            variables[f"transformer/adaptive_softmax/cutoff_{i}/b"] = own
    return variables


@pytest.mark.parametrize("name", TENSORFLOW)
def test_every_kind_of_tensorflow_model_is_understood(tiny_config, tmp_path, name):
    config = replace(tiny_config, **TENSORFLOW[name])
    before = save_model(config, tmp_path / "ours")
    theirs, cutoffs = from_tensorflow(tensorflow_variables(config, before))
    found = model_config("tensorflow", theirs, {"mem_len": config.mem_len, "cutoffs": cutoffs})
    assert (found.clusters, found.tie_biases) == (config.clusters, config.tie_biases)
    in_layers = "layers.0.dec_attn.r_w_bias" in theirs
    table = entries(found, clusters="natural", biases_in_layers=in_layers)
    after = read_weights(theirs, table, {key: x.shape for key, x in before.items()})
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_the_optimizers_variables_of_tensorflow_are_left_out():
    variables = {
        "transformer/r_w_bias": torch.ones(2, 3),
        "transformer/r_w_bias/Adam": torch.ones(2, 3),
        "transformer/r_w_bias/Adam_1": torch.ones(2, 3),
        "global_step": torch.zeros((), dtype=torch.int64),
        "beta1_power": torch.zeros(()),
    }
    assert list(from_tensorflow(variables)[0]) == ["r_w_bias"]
    with pytest.raises(ValueError, match="holds transformer/lstm, which no Transformer-XL has"):
        from_tensorflow({"transformer/lstm": torch.ones(2)})


def test_one_table_of_tensorflow_says_where_its_clusters_begin():
    biases = [torch.full((n,), float(n)) for n in (3, 2, 4)]
    variables = {f"transformer/adaptive_softmax/cutoff_{i}/b": b for i, b in enumerate(biases)}
    variables["transformer/adaptive_embed/lookup_table"] = torch.ones(9, 4)
    tensors, cutoffs = from_tensorflow(variables)
    assert cutoffs == [3, 5]
    assert torch.equal(tensors["crit.out_layers.0.bias"], torch.cat(biases))


@pytest.mark.parametrize(
    ("folder", "files", "origin"),
    [
        ("pt_01_base", ["model.pt"], "authors"),
        ("hf_div2", ["config.json", "model.safetensors"], "huggingface"),
        ("hf_div2", ["config.json", "pytorch_model.bin"], "huggingface"),
        (
            "tf_wt103_like",
            ["model.ckpt-0.index", "model.ckpt-0.data-00000-of-00001"],
            "tensorflow",
        ),
    ],
)
def test_a_folder_is_enough(shared, tmp_path, folder, files, origin):
    for name in files:
        shutil.copy(shared / "goldens" / folder / name, tmp_path)
    assert open_checkpoint(tmp_path).origin == origin
