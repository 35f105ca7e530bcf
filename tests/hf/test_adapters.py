"""Adapters of PEFT: what they change is what the same change of the weights changes."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.inference.evaluate import WithMemory, evaluate
from transformer_xl.inference.generate import Sampling, generate, generate_batch
from transformer_xl.model import TransformerXL
from transformer_xl.model.quantizing import compact

peft = pytest.importorskip("peft")

V = 23
SMALL = ModelConfig(vocab_size=V, n_layer=2, n_head=2, d_model=16, d_inner=24, mem_len=6, dropout=0)
MODELS = {
    "paper": {},
    "Shaw": {"attn_type": 1, "n_positions": 16},
    "absolute": {"attn_type": 2},
    "absolute learned": {"attn_type": 3, "n_positions": 16},
    "norm first": {"norm_first": True, "final_norm": True, "norm": "rms"},
    "raw queries": {"norm_first": True, "quirks": ("raw_queries",)},
    "gates": {"norm_first": True, "gate": "gru"},
    "enhanced recurrence": {"enhanced_recurrence": True},
    "embedding residuals": {"embedding_residual": True},
    "input recurrence": {"input_recurrence": True, "norm_first": True},
    "key offset": {"key_offset": True, "scalable_softmax": 3},
    "gated units": {"activation": "swiglu", "qk_norm": True},
    "narrow embedding": {"d_embed": 8},
    "narrow embedding tied": {"d_embed": 8, "tie_projections": True},
    "untied": {"tie_embeddings": False},
    "adaptive softmax": {"cutoffs": (5, 12)},
    "adaptive": {"cutoffs": (5, 12), "div_val": 2},
}
LAYERS = r".*\.(qkv_proj|o_proj|r_proj|inner|outer|made_proj|old_proj|reset_proj)"
EVERYTHING = r".*\.(\w+_proj|inner|outer)|embedding|softmax"
IN_TABLES = r".*\.(\w+_proj|inner|outer)|embedding\.projs\.\d"


def model_of(settings):
    torch.manual_seed(3)
    return TransformerXL(replace(SMALL, init_std=0.2, **settings)).double().eval()


def targets_of(settings):
    if "div_val" in settings:
        return IN_TABLES
    return EVERYTHING.removesuffix("|softmax") if "cutoffs" in settings else EVERYTHING


def adapted(model, how, target_modules, **settings):
    torch.manual_seed(5)
    if how == "ia3":
        config = peft.IA3Config(target_modules=target_modules, feedforward_modules=[])
    else:
        config = peft.LoraConfig(
            r=3, lora_alpha=5, target_modules=target_modules, use_dora=how == "dora", **settings
        )
    model = peft.get_peft_model(model, config)
    perturb(model)
    return model


def perturb(model):
    """Move the adapters away from where they change nothing."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)


def inside(model):
    """The network within, whatever PEFT has put around it."""
    model = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    return getattr(model, "transformer", model)


def dense(model):
    """A model without adapters, with what each of them does in the weights; nothing is tied."""
    core = inside(model)
    config = replace(core.config, tie_embeddings=False, tie_projections=False)
    made = TransformerXL(config).to(core.dtype).train(core.training)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            *path, attribute = name.split(".")
            module = core
            for part in path:
                if hasattr(module, "base_layer") and part != "base_layer":
                    module = module.base_layer
                module = getattr(module, part)
            if hasattr(module, "base_layer"):
                module = deepcopy(module)
                module.merge()
                module = module.base_layer
            parameter.copy_(getattr(module, attribute))
    return made


def text(n, rows=2):
    torch.manual_seed(11)
    return torch.randint(V, (rows, n))


def training(model):
    """Predictions and losses of two segments, the second with a memory."""
    model.train()
    first, second, targets = text(15).split(5, 1)
    mems = model(first, None, second).mems
    out = model(second, mems, targets)
    return [out.hidden, out.nll, model(second, mems).log_probs]


@torch.no_grad()
def reading(model):
    """The same with keys and values kept, and figures of an evaluation."""
    model.eval()
    mems = model.keep(model.start_memory(2))
    found = []
    for segment in text(15).split([5, 1, 9], 1):
        out = model(segment, mems)
        found += [out.hidden, out.log_probs]
        mems = out.mems
    how = WithMemory(segment_len=4, batch_size=2)
    return [*found, torch.tensor(evaluate(model, text(30, 1)[0], how).nll)]


def writing(model):
    """What is written by every way to write."""
    model.eval()
    alone = list(generate(model, [1, 2], length=8, seed=4))
    side_by_side = list(generate_batch(model, [[1, 2], [3]], length=5, seed=4))
    greedy = list(generate(model, [1, 2], length=8, sampling=Sampling(temperature=0)))
    return alone, side_by_side, greedy


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "lora") for name in MODELS),
        *(("paper", how) for how in ("dora", "ia3")),
        *(("narrow embedding tied", how) for how in ("dora", "ia3")),
    ],
)
def test_an_adapter_changes_what_the_same_change_of_the_weights_does(name, how):
    settings = MODELS[name]
    plain = model_of(settings)
    before = training(plain)[1]
    # IA3 is for linear maps.
    model = inside(adapted(plain, how, LAYERS if how == "ia3" else targets_of(settings)))
    expected, looks = dense(model), (training, reading)
    found, right = ([x for look in looks for x in look(each)] for each in (model, expected))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert (found[1] - before).abs().max() > 1e-3
    assert writing(model) == writing(expected)


def switched(model):
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")


def trained(model):
    with torch.no_grad():
        next(x for x in model.parameters() if x.requires_grad).add_(0.1)


def unloaded(model):
    model.unload()


def disabled(model):
    model.base_model.disable_adapter_layers()


def merged(model):
    model.merge_adapter()


@pytest.mark.parametrize("change", [switched, trained, unloaded, disabled, merged])
def test_kept_keys_and_values_of_other_adapters_are_refused(change):
    model = adapted(model_of({}), "lora", EVERYTHING)
    core = inside(model)
    mems = core.keep(core.start_memory(1))
    with torch.no_grad():
        kept = core(text(4, 1), mems).mems
        same = core(text(4, 1), kept).log_probs
        assert torch.equal(core(text(4, 1), kept.select([0])).log_probs, same)
        states = core(text(4, 1)).mems
        change(model)
        for stale in (kept, kept.last(2), kept.select([0]), kept.to(dtype=torch.float64), mems):
            with pytest.raises(ValueError, match="adapters were added, switched, trained"):
                core(text(4, 1), stale)
        # What was read stays readable: hidden states are projected anew.
        assert core(text(4, 1), states).hidden.isfinite().all()


@pytest.mark.parametrize("settings", [{}, {"d_embed": 8}], ids=str)
def test_what_would_lose_an_adapter_refuses_it(settings, tmp_path):
    model = adapted(model_of(settings).float(), "lora", EVERYTHING)
    core = inside(model)
    with pytest.raises(ValueError, match=r"was wrapped.*it would be left out.*merge_and_unload"):
        compact(core, "bfloat16")
    with pytest.raises(ValueError, match=r"no model folder can hold that.*merge_and_unload"):
        core.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_merged_adapters_are_a_model_like_any_other(tmp_path):
    model = adapted(model_of({"tie_embeddings": False}).float(), "lora", EVERYTHING)
    expected = training(inside(model))
    plain = model.merge_and_unload()
    plain.save_pretrained(tmp_path)
    for each in (plain, TransformerXL.from_pretrained(tmp_path)):
        for found, right in zip(training(each), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    assert compact(plain.eval(), "bfloat16").dtype == torch.bfloat16
