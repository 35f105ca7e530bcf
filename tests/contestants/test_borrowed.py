"""Models with layers of transformers compute what its own models compute."""

import builtins
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from transformer_xl.config import ModelConfig, TrainConfig
from transformer_xl.model import LanguageModel, build_model
from transformer_xl.model.limits import least_weights
from transformer_xl.model.loading import weight_shapes
from transformer_xl.train.optim import Optimizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

V = 31
SIZES = {"vocab_size": V, "n_layer": 2, "d_model": 16, "mem_len": 0, "dropout": 0.0}
KINDS = {
    # Their causal model, and settings of ours.
    "mamba2": ("Mamba2ForCausalLM", {"n_head": 4, "state_size": 8, "conv_width": 3, "expand": 3}),
    "rwkv": ("RwkvForCausalLM", {"d_inner": 37}),
    "xlnet": ("XLNetLMHeadModel", {"n_head": 4, "d_inner": 37}),
    "xlstm": ("xLSTMForCausalLM", {"n_head": 4, "d_inner": 37}),
}


def pair_of(kind: str) -> tuple[LanguageModel, torch.nn.Module]:
    """Our model, and the library's of the same sizes with weights of its own."""
    name, change = KINDS[kind]
    own = build_model(ModelConfig(kind=kind, **SIZES, **change, tie_embeddings=False)).eval()
    # They cap the logits of an xLSTM, and we do not.
    change = {"vocab_size": V, "output_logit_soft_cap": 1e6, "tie_word_embeddings": False}
    settings = type(own.body.config)(**own.body.config.to_dict() | change)
    return own, getattr(transformers, name)(settings).eval()


def copy_to_library(own: LanguageModel, theirs: torch.nn.Module) -> None:
    theirs.base_model.load_state_dict(own.body.state_dict(), strict=False)
    theirs.get_input_embeddings().weight.copy_(own.embedding.weight * own.embedding.embed_scale)
    theirs.get_output_embeddings().weight.copy_(own.softmax.weight)


def copy_from_library(own: LanguageModel, theirs: torch.nn.Module) -> None:
    missing = own.body.load_state_dict(theirs.base_model.state_dict(), strict=False).missing_keys
    assert not missing
    own.embedding.weight.copy_(theirs.get_input_embeddings().weight / own.embedding.embed_scale)
    own.softmax.weight.copy_(theirs.get_output_embeddings().weight)


@pytest.mark.parametrize("copy", [copy_to_library, copy_from_library])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_loss_is_that_of_the_library(kind, copy):
    own, theirs = pair_of(kind)
    tokens = torch.randint(V, (3, 70))
    assert not torch.allclose(
        theirs(tokens, use_cache=False).logits.log_softmax(-1), own(tokens).log_probs
    )
    copy(own, theirs)
    logits = theirs(tokens, use_cache=False).logits
    torch.testing.assert_close(own(tokens).log_probs, logits.log_softmax(-1), rtol=1e-4, atol=1e-5)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss = own(tokens[:, :-1], targets=tokens[:, 1:]).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_memory_of_xlnet_is_that_of_the_library():
    own, theirs = pair_of("xlnet")
    copy_to_library(own, theirs)
    first, second = torch.randint(V, (2, 2, 9))
    theirs.base_model.mem_len = 12
    expected = theirs(second, mems=theirs(first, use_mems=True).mems, use_mems=True)
    mems = own(first, mem_len=12).mems
    found = own(second, mems, mem_len=12)
    logits = expected.logits.log_softmax(-1)
    torch.testing.assert_close(found.log_probs, logits, rtol=1e-4, atol=1e-5)
    assert len(found.mems) == 12
    states = tuple(x.transpose(0, 1) for x in expected.mems)
    torch.testing.assert_close(found.mems.states, states, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"attn_len=3: a model of kind='xlnet' attends to all of its"
    ):
        own(first, attn_len=3)


@pytest.mark.parametrize("kind", KINDS)
def test_muon_takes_the_matrices_of_the_layers_and_vectors_do_not_decay(kind):
    model, _ = pair_of(kind)
    optimizer = Optimizer(model, TrainConfig(optimizer="muon", weight_decay=0.1))
    names = {parameter: name for name, parameter in model.named_parameters()}
    adamw, muon = optimizer.parts
    of_muon = {names[x] for group in muon.param_groups for x in group["params"]}
    assert of_muon == {
        name for name, x in model.named_parameters() if name.startswith("body.") and is_matrix(name)
    }
    decayed = {names[x] for g in adamw.param_groups if g["weight_decay"] for x in g["params"]}
    assert decayed == {"embedding.weight", "softmax.weight"}


def is_matrix(name: str) -> bool:
    # Convolutions have three dimensions.
    if name.endswith(tuple(f".rel_attn.{x}" for x in "qkvor")):
        return True
    return name.endswith(".weight") and not any(x in name for x in ("norm", "ln", "conv1d"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_counted(kind):
    model, _ = pair_of(kind)
    n_weights = sum(x.numel() for x in model.parameters())
    assert least_weights(model.config) == n_weights


@pytest.mark.slow
def test_the_library_is_imported_for_such_a_model_only():
    code = (
        "import sys, transformer_xl.model as m; from transformer_xl.config import ModelConfig;"
        "m.build_model(ModelConfig(kind='lstm', vocab_size=5, n_layer=1, d_model=4));"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_library_it_is_said_what_to_install(monkeypatch):
    imported = builtins.__import__

    def refuse(name, *rest):
        if name == "transformers":
            raise ModuleNotFoundError(name=name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RuntimeError, match=r"kind='mamba2'.*pip install .*\[hf\]"):
        build_model(ModelConfig(kind="mamba2", **SIZES))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kind": "xlnet", "d_model": 10**9}, "d_model=1000000000"),
        ({"kind": "mamba2", "d_model": 16, "n_head": 2, "conv_width": 10**12}, "conv_width=10"),
    ],
)
def test_a_hostile_size_is_refused_before_the_library_allocates_it(settings, named):
    config = ModelConfig(vocab_size=5, n_layer=1, mem_len=0, **settings)
    with pytest.raises(ValueError, match=f"{named}.*the weights would take at least"):
        weight_shapes(config)


def test_an_rwkv_of_one_feature_is_refused():
    with pytest.raises(ValueError, match="d_model=1 must be 2 or more"):
        ModelConfig(kind="rwkv", vocab_size=5, n_layer=2, d_model=1)


def test_heads_must_divide_the_inner_width():
    with pytest.raises(ValueError, match="n_head=5 must divide expand x d_model = 32"):
        ModelConfig(kind="mamba2", **SIZES, n_head=5)
    with pytest.raises(ValueError, match="state_size=8 has no effect with kind='lstm'"):
        ModelConfig(kind="lstm", **SIZES, state_size=8)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_weights_in_half_precision_predict_nearly_the_same(kind: str) -> None:
    torch.manual_seed(0)
    model, _ = pair_of(kind)
    tokens, found = torch.randint(0, V, (2, 9)), []
    for _ in range(2):
        _, mems = model.eval()(tokens), None
        log_probs = []
        # Segments of several tokens and of one, which the library computes in other ways.
        for part in (tokens[:, :5], tokens[:, 5:6], tokens[:, 6:]):
            output = model(part, mems, mem_len=9)
            mems = output.mems
            log_probs.append(output.log_probs.float())
        found.append(torch.cat(log_probs, 1))
        model.bfloat16()
    exact, rounded = found
    assert exact.std() > 0.01
    assert (rounded - exact).abs().max() < 0.05
