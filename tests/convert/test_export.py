"""Models in the layouts of the old implementations, and back."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import transformer_xl as txl
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.interop.convert.export import write_authors, write_huggingface

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
def test_a_model_converted_there_and_back_is_the_same_bit_for_bit(
    save_model, tiny_config, tmp_path, to, name
):
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
        tie_biases=config.tie_biases and config.attn_type != 1,
        quirks=config.quirks if to == "authors" else (),
        init_std=config.init_std if to == "huggingface" else 0.02,
    )
    assert again == expected


OTHERWISE = [
    ({"attn_type": 2}, "without the quirk stored_positions"),
    ({"attn_type": 2, "mem_len": 0, "norm_first": True}, "without the quirk raw_queries"),
    ({"final_norm": True}, "after the layers; .* is trained with --model.final_norm False$"),
    ({"final_norm": True, "norm": "rms"}, "with --model.norm layer --model.final_norm False$"),
    ({"clamp_len": 0}, "clamp_len=0: in the authors' PyTorch code it means no limit"),
    ({"ext_len": 2}, "without the quirk swapped_ext_len"),
    ({"attn_len": 3, "mem_len": 0}, "same_length hides every key"),
    ({"attn_type": 1, "n_positions": 5}, "have more rows than mem_len"),
    (
        {"attn_type": 3, "n_positions": 20, "d_head": 5, "quirks": ("stored_positions",)},
        "n_head x d_head = 10",
    ),
    ({"cutoffs": (5,), "div_val": 2, "proj_same_dim": False}, "cluster 0 has no projection"),
    ({"norm": "rms"}, "norm='rms': the authors' PyTorch code has no other network than that"),
    ({"activation": "geglu"}, "activation='geglu': .* that of activation='relu'"),
    ({"gate": "gru", "norm_first": True}, "gate='gru': .* that of gate='none'"),
    ({"qk_norm": True}, "qk_norm=True: .* that of qk_norm=False"),
    ({"value_residual": True}, "value_residual=True: the authors' PyTorch code"),
    ({"embedding_residual": True}, "embedding_residual=True: the authors' PyTorch code"),
    ({"input_recurrence": True}, "input_recurrence=True: the authors' PyTorch code"),
    ({"layer_attn_lens": (3, 5, 7)}, r"layer_attn_lens=\(3, 5, 7\): the authors' PyTorch code"),
    ({"enhanced_recurrence": True}, "enhanced_recurrence=True: the authors' PyTorch code"),
    (
        {"kind": "lstm", "n_head": 8, "d_inner": 2048},
        "kind='lstm': the authors' PyTorch code has no other network",
    ),
]


def test_what_the_authors_code_would_compute_otherwise_is_refused(
    save_model, tiny_config, tmp_path
):
    for number, (settings, message) in enumerate(OTHERWISE):
        folder = tmp_path / f"{number}"
        save_model(replace(tiny_config, **settings), folder)
        with pytest.raises(ValueError, match=message):
            txl.convert(folder, tmp_path / "theirs", to="authors")


@pytest.mark.parametrize("to", FORMATS)
def test_that_a_text_does_not_begin_anew_there_is_told(save_model, tiny_config, tmp_path, to):
    told = []
    save_model(replace(tiny_config, reset_at=3), tmp_path / "ours")
    txl.convert(tmp_path / "ours", tmp_path / "theirs", to=to, say=told.append)
    assert [line for line in told if line.startswith("reset_at=3: in their code")]


@pytest.mark.parametrize("to", FORMATS)
def test_dropout_that_their_code_has_not_is_told(save_model, tiny_config, tmp_path, to):
    own = {"embed_dropout": 0.1, "output_dropout": 0.5, "variational_dropout": True}
    before, told = save_model(replace(tiny_config, **own), tmp_path / "ours"), []
    txl.convert(tmp_path / "ours", tmp_path / "theirs", to=to, say=told.append)
    assert [line.split("=")[0] for line in told if "has no such dropout" in line] == [*own]
    txl.convert(tmp_path / "theirs", tmp_path / "again")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_one_bias_for_all_layers_is_theirs_once_for_each(save_model, tiny_config, tmp_path):
    before = save_model(replace(tiny_config, attn_type=1, n_positions=20), tmp_path / "ours")
    txl.convert(tmp_path / "ours", tmp_path / "theirs", to="authors")
    txl.convert(tmp_path / "theirs", tmp_path / "again")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert torch.equal(after["content_bias"], before["content_bias"].expand(3, -1, -1))


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


def test_a_vocabulary_that_their_tokenizer_splits_differently_is_named(
    save_model, tiny_config, tmp_path
):
    vocab = train_vocab("words", ["I don't like well-known cats\n"], None, ["unknown"])
    save_model(replace(tiny_config, vocab_size=len(vocab)), tmp_path / "ours")
    vocab.save(tmp_path / "ours")
    said = []
    txl.convert(tmp_path / "ours", tmp_path / "theirs", to="huggingface", say=said.append)
    assert any("TransfoXLTokenizer splits by the Moses rules" in x for x in said)
