"""The authors' PyTorch code and ours give the same numbers, with every attention backend.

The files are described in ``goldens/README.md`` of the shared folder. Names of parameters are
theirs on the left. Only what ``torch.load(weights_only=True)`` accepts is read.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from transformer_xl.config import ModelConfig
from transformer_xl.nn import TransformerXL
from transformer_xl.ops import use_backend

CONFIGS = [
    "pt_01_base",
    "pt_02_pre_lnorm",
    "pt_05_embed16",
    "pt_06_same_length",
    "pt_07_clamp5",
    "pt_09_mem20_tgt5",
    "pt_10_mem0",
    "pt_14_untied",
]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

RENAMED = {
    "r_w_bias": "content_bias",
    "r_r_bias": "position_bias",
    "word_emb.emb_layers.0.weight": "embedding.weight",
    "word_emb.emb_projs.0": "embedding.proj.weight",
    "crit.out_layers.0.weight": "softmax.weight",
    "crit.out_layers.0.bias": "softmax.bias",
    "crit.out_projs.0": "softmax.proj.weight",
}
RENAMED_IN_LAYERS = {
    "dec_attn.qkv_net": "attention.qkv_proj",
    "dec_attn.r_net": "attention.r_proj",
    "dec_attn.o_net": "attention.o_proj",
    "dec_attn.layer_norm": "attention_norm",
    "pos_ff.CoreNet.0": "feed_forward.inner",
    "pos_ff.CoreNet.3": "feed_forward.outer",
    "pos_ff.layer_norm": "feed_forward_norm",
}


def our_name(theirs: str) -> str:
    """Translate the name of a parameter."""
    if theirs in RENAMED:
        return RENAMED[theirs]
    for old, new in RENAMED_IN_LAYERS.items():
        theirs = theirs.replace(old, new)
    return theirs


def our_config(kwargs: dict) -> ModelConfig:
    """Translate the arguments of the authors' model."""
    names = ("n_layer", "n_head", "d_model", "d_head", "d_inner", "d_embed", "mem_len", "dropout")
    return ModelConfig(
        vocab_size=kwargs["n_token"],
        **{name: kwargs[name] for name in names},
        attn_dropout=kwargs["dropatt"],
        norm_first=kwargs["pre_lnorm"],
        tie_embeddings=kwargs["tie_weight"],
        tie_projections=kwargs["tie_projs"][0],
        attn_len=kwargs["mem_len"] if kwargs["same_length"] else None,
        clamp_len=kwargs["clamp_len"] if kwargs["clamp_len"] > 0 else None,
    )


def our_parameters(theirs: dict[str, torch.Tensor], config: ModelConfig) -> dict:
    """Translate parameters or gradients; biases gain the dimension of layers."""
    ours = {}
    for name, tensor in theirs.items():
        name = our_name(name)
        if name == "pos_emb.inv_freq":
            continue
        ours[name] = tensor[None] if name in ("content_bias", "position_bias") else tensor
    return ours


def load_golden(folder: Path, name: str, file: str) -> tuple[ModelConfig, dict, dict]:
    """Return our configuration, the golden tensors and our parameters."""
    kwargs = json.loads((folder / name / "config.json").read_text())["model_kwargs"]
    config = our_config(kwargs)
    golden = load_file(folder / name / file)
    prefix = "param0." if "train" in name else "param."
    theirs = {k.removeprefix(prefix): x for k, x in golden.items() if k.startswith(prefix)}
    return config, golden, our_parameters(theirs, config)


def build(config: ModelConfig, parameters: dict, dtype: torch.dtype) -> TransformerXL:
    """Build our model with the given parameters, in evaluation mode."""
    model = TransformerXL(config).to(dtype).eval()
    missing, unexpected = model.load_state_dict(parameters, strict=False)
    assert not unexpected
    assert set(missing) <= {"softmax.weight"}, missing
    return model


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", ["reference", "skew"])
@pytest.mark.parametrize("file", ["golden.safetensors", "golden_init.safetensors"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_of_the_authors_code_is_ours(shared, name, file, backend, dtype):
    config, golden, parameters = load_golden(shared / "goldens", name, file)
    model = build(config, parameters, dtype)

    def check(ours, theirs, what):
        torch.testing.assert_close(
            ours.detach().double(), theirs, rtol=0, atol=TOLERANCE[dtype],
            msg=lambda text: f"{what}: {text}",
        )  # fmt: skip

    mems = None
    segments = sum(key.startswith("target.") for key in golden)
    with use_backend(backend):
        for s in range(segments):
            tokens, targets = golden[f"input.{s}"].T, golden[f"target.{s}"].T
            out = model(tokens, mems, targets)
            check(out.nll.T, golden[f"nll_ordered.{s}"], f"losses of segment {s}")
            check(out.loss, golden[f"loss.{s}"], f"loss of segment {s}")
            check(out.hidden.transpose(0, 1), golden[f"hidden.{s}"], f"hidden states {s}")
            if config.mem_len:
                for n, state in enumerate(out.mems.states):
                    check(state.transpose(0, 1), golden[f"mems.{s}.{n}"], f"memory {s}.{n}")
            log_probs = model(tokens, mems).log_probs
            if f"logprob.{s}" in golden:
                check(log_probs.transpose(0, 1), golden[f"logprob.{s}"], "distribution")
            mems = out.mems
        out.loss.backward()

    theirs = {k.removeprefix("grad."): x for k, x in golden.items() if k.startswith("grad.")}
    gradients = our_parameters(theirs, config)
    ours = dict(model.named_parameters())
    assert gradients.keys() == ours.keys()
    for parameter, gradient in gradients.items():
        check(ours[parameter].grad, gradient, f"gradient of {parameter}")


def test_the_authors_state_dict_loads_as_it_is(shared):
    config, _, parameters = load_golden(shared / "goldens", "pt_01_base", "golden.safetensors")
    state = torch.load(shared / "goldens/pt_01_base/state_dict.pt", weights_only=True)
    model = build(config, our_parameters(state, config), torch.float64)
    for name, parameter in build(config, parameters, torch.float64).state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], parameter, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["reference", "skew"])
def test_training_follows_the_authors_trajectory(shared, backend):
    name = "pt_train_01_base"
    config, golden, parameters = load_golden(shared / "goldens", name, "golden.safetensors")
    hyper = json.loads((shared / "goldens" / name / "config.json").read_text())["hyper"]
    model = build(config, parameters, torch.float64).train()
    # The order of the parameters decides in which order the clipping norm is summed.
    optimizer = torch.optim.Adam(model.parameters(), betas=hyper["betas"], eps=hyper["eps"])
    mems = None
    with use_backend(backend):
        for step, lr in enumerate(golden["lr_used"].tolist()):
            optimizer.param_groups[0]["lr"] = lr
            tokens = golden["tokens"][step * 7 : step * 7 + 8].T
            out = model(tokens[:, :-1], mems, tokens[:, 1:])
            mems = out.mems
            optimizer.zero_grad()
            out.loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), hyper["clip"])
            torch.testing.assert_close(out.loss, golden["loss"][step], rtol=0, atol=1e-10)
            expected = golden["grad_norm_before_clip"][step]
            torch.testing.assert_close(norm, expected, rtol=0, atol=1e-10)
            optimizer.step()
    prefix = "param_final."
    final = {k.removeprefix(prefix): x for k, x in golden.items() if k.startswith(prefix)}
    for name, parameter in our_parameters(final, config).items():
        torch.testing.assert_close(model.state_dict()[name], parameter, rtol=0, atol=1e-10)
