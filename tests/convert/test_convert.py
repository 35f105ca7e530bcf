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
from transformer_xl.convert import SETTABLE, UnreadableFile
from transformer_xl.convert.checkpoints import from_tensorflow, open_checkpoint
from transformer_xl.convert.export import write_authors, write_huggingface
from transformer_xl.convert.layouts import entries, read_weights, write_weights
from transformer_xl.convert.settings import model_config
from transformer_xl.nn.pretrained import load_eval_config


def save_model(config, folder):
    """Write one of our models with random weights; return its weights."""
    model = txl.TransformerXL(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.fixture
def adaptive(tiny_config):
    return replace(
        tiny_config, cutoffs=(5, 12), div_val=2, tie_projections=(False, True, True), d_embed=16
    )


VARIANTS = {
    "paper": {},
    "untied biases": {"tie_biases": False, "start_memory": "zeros"},
    "narrow": {"d_embed": 6, "tie_projections": True},
    "untied": {"tie_embeddings": False, "norm_first": True},
    "one table": {"cutoffs": (5, 12), "d_embed": 6, "tie_projections": (False, True, False)},
    "adaptive": {"cutoffs": (5, 12), "div_val": 2, "tie_embeddings": False},
    "adaptive, tied": {"cutoffs": (5, 12), "div_val": 2, "tie_projections": (False, True, True)},
    "one cluster with a projection": {"div_val": 2},
    "shaw": {"attn_type": 1, "n_positions": 20, "tie_biases": False, "clamp_len": 7},
    "sinusoids": {"attn_type": 2, "quirks": ("stored_positions",)},
    "learned": {"attn_type": 3, "n_positions": 20, "quirks": ("stored_positions",)},
    "limits": {"clamp_len": 7, "ext_len": 3, "quirks": ("swapped_ext_len",)},
}
FORMATS = {"authors": write_authors, "huggingface": write_huggingface}


def is_expressible(to, settings):
    if to == "huggingface":
        return settings.get("attn_type", 0) == 0 and not settings.get("ext_len")
    return settings.get("tie_biases", True) or settings.get("attn_type") == 1


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_converted_there_and_back_is_the_same_bit_for_bit(tiny_config, tmp_path, to, name):
    settings = VARIANTS[name]
    config = replace(tiny_config, **settings)
    before = save_model(config, tmp_path / "ours")
    if not is_expressible(to, settings):
        with pytest.raises(ValueError, match=r"attn_type|tie_biases|ext_len"):
            txl.convert(tmp_path / "ours", tmp_path / "theirs", to=to)
        assert not (tmp_path / "theirs").exists()
        return
    txl.convert(tmp_path / "ours", tmp_path / "theirs", to=to)
    txl.convert(tmp_path / "theirs", tmp_path / "again")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    again = txl.TransformerXL.from_pretrained(tmp_path / "again").config
    # What the format cannot say is chosen as its own code computes.
    start = "zeros" if to == "huggingface" else "empty"
    expected = replace(
        config,
        start_memory=start,
        d_head=config.head_width,
        d_embed=config.embed_width,
        tie_projections=tuple(cluster.ties_proj for cluster in config.clusters),
        tie_biases=config.tie_biases and config.attn_type == 0,
        quirks=config.quirks if to == "authors" else (),
        init_std=config.init_std if to == "huggingface" else 0.02,
    )
    assert again == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attn_type": 2}, "without the quirk stored_positions"),
        ({"attn_type": 2, "mem_len": 0, "norm_first": True}, "without the quirk raw_queries"),
        ({"final_norm": True}, "no normalization after the layers"),
        ({"clamp_len": 0}, "clamp_len=0: in the authors' PyTorch code it means no limit"),
        ({"ext_len": 2}, "without the quirk swapped_ext_len"),
        ({"attn_len": 3, "mem_len": 0}, "same_length hides every key"),
        ({"attn_type": 1, "n_positions": 5}, "have more rows than mem_len"),
        (
            {"attn_type": 3, "n_positions": 20, "d_head": 5, "quirks": ("stored_positions",)},
            "n_head x d_head = 10",
        ),
        ({"cutoffs": (5,), "div_val": 2, "proj_same_dim": False}, "cluster 0 has no projection"),
    ],
    ids=str,
)
def test_what_the_authors_code_would_compute_otherwise_is_refused(
    tiny_config, tmp_path, settings, message
):
    save_model(replace(tiny_config, **settings), tmp_path / "ours")
    with pytest.raises(ValueError, match=message):
        txl.convert(tmp_path / "ours", tmp_path / "theirs", to="authors")


def test_one_bias_for_all_layers_is_theirs_once_for_each(tiny_config, tmp_path):
    before = save_model(replace(tiny_config, attn_type=1, n_positions=20), tmp_path / "ours")
    txl.convert(tmp_path / "ours", tmp_path / "theirs", to="authors")
    txl.convert(tmp_path / "theirs", tmp_path / "again")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert torch.equal(after["content_bias"], before["content_bias"].expand(3, -1, -1))


@pytest.mark.parametrize("factor", [1, 1 + 1e-6])
def test_frequencies_are_those_of_the_paper_or_the_file_is_refused(shared, tmp_path, factor):
    def change(state):
        state["pos_emb.inv_freq"] = (state["pos_emb.inv_freq"] * 3 * factor).half()

    source = spoiled(shared / "goldens/pt_01_base", tmp_path, change)
    with pytest.raises(ValueError, match=r"pos_emb.inv_freq are not the frequencies"):
        txl.convert(source, tmp_path / "out")


def test_half_precision_comes_back_in_half_precision(shared, tmp_path):
    folder = shared / "goldens/pt_01_base"
    before = {k: x.half() for k, x in torch.load(folder / "state_dict.pt").items()}
    torch.save(before, tmp_path / "state_dict.pt")
    shutil.copy(folder / "config.json", tmp_path)
    txl.convert(tmp_path / "state_dict.pt", tmp_path / "ours")
    txl.convert(tmp_path / "ours", tmp_path / "theirs", to="authors")
    after = torch.load(tmp_path / "theirs/state_dict.pt")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], x) and after[k].dtype == x.dtype for k, x in before.items())


def test_a_vocabulary_can_be_given_later(shared, tiny_config, tmp_path):
    save_model(tiny_config, tmp_path / "ours")
    words = [f"word{i}" for i in range(tiny_config.vocab_size - 2)]
    (tmp_path / "vocab.txt").write_text("\n".join(["<eos>", "<unk>", *words]) + "\n")
    txl.convert(tmp_path / "ours", tmp_path / "out", vocab=tmp_path / "vocab.txt")
    assert txl.load_vocab(tmp_path / "out").encode("word3") == [5]
    with pytest.raises(ValueError, match="mem_len: a model folder says all of this itself"):
        txl.convert(tmp_path / "ours", tmp_path / "more", settings={"mem_len": 9})
    with pytest.raises(FileNotFoundError, match=r"nowhere.txt does not exist: give the file"):
        txl.convert(tmp_path / "ours", tmp_path / "more", vocab=tmp_path / "nowhere.txt")


@pytest.mark.parametrize("to", ["txl", "authors"])
def test_a_damaged_model_folder_is_not_passed_on(tiny_config, tmp_path, to):
    save_model(tiny_config, tmp_path / "ours")
    config = tmp_path / "ours/config.json"
    whole, weights = config.read_text(), (tmp_path / "ours/model.safetensors").read_bytes()
    for text, content in (
        (whole.replace('"n_layer": 3', '"n_layer": 4'), weights),
        (whole.replace('"format_version": 1', '"format_version": 99'), weights),
        (whole, weights[:-100]),
        (whole.replace('"vocab_size": 31', '"vocab_size": 10000000000000'), weights),
    ):
        config.write_text(text)
        (tmp_path / "ours/model.safetensors").write_bytes(content)
        with pytest.raises(RuntimeError, match=r"does not fit|has format 99|is damaged"):
            txl.convert(tmp_path / "ours", tmp_path / "out", to=to)
        assert not (tmp_path / "out").exists()


def test_files_that_contain_themselves_end_in_the_one_error(tmp_path):
    content = {}
    content["model"] = content
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(UnreadableFile, match="one dictionary or module in another"):
        txl.convert(tmp_path / "model.pt", tmp_path / "out")


def test_a_name_may_hold_any_character(shared, tmp_path):
    for path in (shared / "goldens/tf_wt103_like").glob("model.ckpt-0.*"):
        shutil.copy(path, tmp_path / path.name.replace("model.ckpt-0", "m[1]*.ckpt"))
    shutil.copy(shared / "goldens/tf_wt103_like/config.json", tmp_path)
    for n, name in enumerate(("m[1]*.ckpt", "m[1]*.ckpt.index")):
        txl.convert(tmp_path / name, tmp_path / f"out{n}")


def test_all_that_is_missing_is_asked_for_at_once(shared, tmp_path):
    source = bare(shared, tmp_path, "pt_03_adaptive_div1")
    with pytest.raises(ValueError, match=r"--mem_len NUMBER.*--pre_lnorm True or False.*--cutoffs"):
        txl.convert(source, tmp_path / "out")


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


@pytest.mark.parametrize("kept", ["layers.0.dec_attn.", "layers.2.dec_attn.", ""])
def test_a_shared_bias_of_hugging_face_may_have_any_of_its_names(tiny_config, tmp_path, kept):
    before = save_model(tiny_config, tmp_path / "ours")
    txl.convert(tmp_path / "ours", tmp_path / "theirs", to="huggingface")
    state = torch.load(tmp_path / "theirs/pytorch_model.bin", weights_only=True)
    biases = {f"transformer.{kept}{name}" for name in ("r_w_bias", "r_r_bias")}
    left = {k: x for k, x in state.items() if k in biases or not k.endswith(("w_bias", "r_bias"))}
    assert len(left) == len(state) - 2 * tiny_config.n_layer
    torch.save(left, tmp_path / "theirs/pytorch_model.bin")
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
    table = entries(config, clusters="natural", biases_in_layers=False)
    variables = {}
    for name, x in write_weights(weights, table, config).items():
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


def test_where_clusters_begin_is_asked_for(shared, tmp_path):
    source = bare(shared, tmp_path, "pt_03_adaptive_div1")
    given = {"mem_len": 9, "pre_lnorm": False}
    with pytest.raises(ValueError, match=r"does not say cutoffs.* --cutoffs with 2 NUMBERS"):
        txl.convert(source, tmp_path / "out", settings=given)
    with pytest.raises(ValueError, match="do not make the 3 clusters"):
        txl.convert(source, tmp_path / "out", settings=given | {"cutoffs": [11]})
    txl.convert(source, tmp_path / "out", settings=given | {"cutoffs": [11, 31]})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mem_len": -1}, "mem_len=-1 must be at least 0"),
        ({"mem_len": 1 << 40}, "more than"),
        ({"mem_len": "many"}, "must be a whole number"),
        ({"same_length": 7}, "must be true or false"),
        ({"n_heads": 3}, "settings has 'n_heads'"),
        ({"n_head": 5}, "n_head=5, but the tensors of the checkpoint say 3"),
        ({"layer_norm_epsilon": "small"}, "must be a number"),
        ({"mem_len": 0, "same_length": True}, "hides every key"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(shared, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        txl.convert(shared / "goldens/pt_01_base/model.pt", tmp_path / "out", settings=settings)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_left_alone(shared, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty: choose another folder"):
        txl.convert(shared / "goldens/pt_01_base/model.pt", tmp_path / "out")
    assert [x.name for x in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_what_a_killed_conversion_left_behind_does_not_matter(shared, tmp_path):
    (tmp_path / ".out.unfinished").mkdir()
    (tmp_path / ".out.unfinished/config.json").write_text("half")
    txl.convert(shared / "goldens/pt_01_base/model.pt", tmp_path / "out")
    assert [x.name for x in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["malicious_model.pt", "truncated_model.pt"])
def test_hostile_and_broken_files_end_in_one_error(shared, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnreadableFile, match=name):
        txl.convert(shared / "goldens/security" / name, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


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
        (lambda s: s.clear(), "holds no tensors"),
        (lambda s: s.update(epoch=[3]), "holds 'epoch' of type list"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(shared, tmp_path, change, message):
    source = spoiled(shared / "goldens/pt_01_base", tmp_path, change)
    with pytest.raises(ValueError, match=message):
        txl.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_tensor_named_a_thousand_times_takes_no_room(shared, tmp_path):
    def repeat(state):
        layer = {k: x for k, x in state.items() if k.startswith("layers.0.")}
        for n in range(3, 1000):
            state.update({k.replace("layers.0.", f"layers.{n}."): x for k, x in layer.items()})

    source = spoiled(shared / "goldens/pt_01_base", tmp_path, repeat)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UnreadableFile, match="weights: it is damaged"):
        txl.convert(source, tmp_path / "out", settings={"mem_len": 9, "pre_lnorm": False})


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


def test_how_a_model_is_evaluated_comes_with_it(shared, tmp_path):
    txl.convert(shared / "goldens/pt_09_mem20_tgt5/model.pt", tmp_path / "out")
    settings = load_eval_config(tmp_path / "out/config.json")
    assert (settings.segment_len, settings.mem_len) == (5, None)
    about = json.loads((tmp_path / "out/config.json").read_text())["origin"]
    assert about["format"] == "authors"
    assert about["settings"]["mem_len"] == 20


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


def test_a_folder_without_a_checkpoint_says_what_it_should_hold(tmp_path):
    with pytest.raises(ValueError, match=r"should hold one checkpoint .* and holds none"):
        txl.convert(tmp_path, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="does not exist: give a checkpoint"):
        txl.convert(tmp_path / "nothing.pt", tmp_path / "out")


def test_the_command_line_offers_what_a_checkpoint_may_not_say():
    from transformer_xl.cli.runs import Convert

    assert set(SETTABLE) <= set(Convert.__annotations__)
