"""A GPT; what it shares with a Transformer-XL is among the laws."""

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model import Memory, build_model
from transformer_xl.studies.models import GPT

CONFIG = {
    "kind": "gpt",
    "vocab_size": 31,
    "n_layer": 2,
    "n_head": 2,
    "d_model": 16,
    "d_inner": 24,
    "mem_len": 0,
    "dropout": 0.0,
    "init_std": 0.3,
}


def gpt(**settings) -> GPT:
    model = build_model(ModelConfig(**{**CONFIG, **settings}))
    assert isinstance(model, GPT)
    return model.double().eval()


@pytest.fixture
def tokens():
    return torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_its_loss_is_that_of_llama_in_transformers(tokens):
    transformers = pytest.importorskip("transformers")
    model = gpt(norm="rms", activation="swiglu")
    config, D = model.config, model.config.d_model
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=31,
            hidden_size=D,
            intermediate_size=config.d_inner,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            mlp_bias=True,
            rms_norm_eps=config.norm_eps,
            rope_theta=10_000.0,
            tie_word_embeddings=False,
        )
    )
    theirs = theirs.double().eval()
    weights = {}
    for name, x in model.state_dict().items():
        if name.endswith("qkv_proj.weight"):
            parts = dict(zip("qkv", x.chunk(3), strict=True))
            layer = name.split(".")[1]
            for part, matrix in parts.items():
                weights[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = matrix
        elif ".inner." in name:
            _, layer, _, _, kind = name.split(".")
            for part, half in zip(("gate", "up"), x.chunk(2), strict=True):
                weights[f"model.layers.{layer}.mlp.{part}_proj.{kind}"] = half
    renamed = {
        "attention.o_proj": "self_attn.o_proj",
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward.outer": "mlp.down_proj",
    }
    own = model.state_dict()
    for layer in range(config.n_layer):
        for ours, name in renamed.items():
            for kind in ("weight", "bias"):
                if (x := own.get(f"layers.{layer}.{ours}.{kind}")) is not None:
                    weights[f"model.layers.{layer}.{name}.{kind}"] = x
    weights["model.norm.weight"] = own["final_norm.weight"]
    # Our embeddings are scaled by the root of the width, and the softmax has a bias.
    weights["model.embed_tokens.weight"] = own["embedding.weight"] * D**0.5
    weights["lm_head.weight"] = own["embedding.weight"]
    theirs.load_state_dict(weights)
    out = theirs(tokens[:, :-1]).logits + own["softmax.bias"]
    expected = torch.nn.functional.cross_entropy(out.transpose(1, 2), tokens[:, 1:])
    found = model(tokens[:, :-1], targets=tokens[:, 1:]).loss
    # Their sinusoids are in float32.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@torch.no_grad()
def test_without_a_memory_segments_share_nothing(tokens):
    model = gpt()
    first = model(tokens[:, :5])
    assert len(first.mems) == 0
    second = model(tokens[:, 5:], first.mems).log_probs
    torch.testing.assert_close(second, model(tokens[:, 5:]).log_probs)


@torch.no_grad()
def test_a_cache_of_a_window_holds_keys_and_values_of_the_last_positions(tokens):
    model = gpt(mem_len=4)
    mems = model(tokens).mems
    assert [x.shape for x in mems.states] == [(2, 4, 2 * 16)] * 2
    # Those of the first layer depend on their own tokens alone.
    torch.testing.assert_close(mems.states[0], model(tokens[:, 8:]).mems.states[0])
    restored = Memory.from_state_dict(mems.state_dict())
    next_token = tokens[:, :1]
    torch.testing.assert_close(
        model(next_token, restored).log_probs, model(next_token, mems).log_probs
    )


def test_no_gradient_flows_through_the_cache(tokens):
    model = gpt(mem_len=8).train()
    mems = model(tokens[:, :6], targets=tokens[:, 1:7]).mems
    assert not any(x.requires_grad for x in mems.states)


@pytest.mark.parametrize(
    "settings",
    [{"clamp_len": 3}, {"attn_type": 2}, {"norm_first": True}, {"gate": "gru"}],
)
def test_settings_of_other_models_are_refused(settings):
    with pytest.raises(ValueError, match="kind='gpt', which has no such part"):
        gpt(**settings)


def test_an_odd_head_is_refused():
    with pytest.raises(ValueError, match="d_head=5 must be even with kind='gpt'"):
        gpt(d_head=5)
