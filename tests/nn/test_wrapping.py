"""A module that was wrapped, replaced or hooked is called; a plain one need not be."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from transformer_xl.config import ModelConfig
from transformer_xl.inference.generate import generate
from transformer_xl.model import FeedForward, RelAttention, TransformerXL, build_model
from transformer_xl.model.calling import is_plain
from transformer_xl.model.tokens import Softmax

V = 23
SMALL = ModelConfig(vocab_size=V, n_layer=2, n_head=2, d_model=16, d_inner=24, mem_len=6, dropout=0)
MODELS = {
    "paper": {},
    "norm first": {"norm_first": True, "final_norm": True, "norm": "rms"},
    "gates and raw queries": {"norm_first": True, "gate": "gru", "quirks": ("raw_queries",)},
    "enhanced recurrence": {"enhanced_recurrence": True, "d_embed": 8},
    "absolute": {"attn_type": 2},
    "adaptive": {"cutoffs": (5, 12), "div_val": 2},
}
TEXT = torch.arange(30).view(2, 15) * 7 % V


def made(name):
    torch.manual_seed(3)
    return TransformerXL(replace(SMALL, init_std=0.2, **MODELS[name])).double().eval()


@pytest.fixture(params=MODELS)
def model(request):
    return made(request.param)


def training(model):
    first, second, targets = TEXT.split(5, 1)
    mems = model(first, None, second).mems
    return torch.cat([model(second, mems, targets).nll, model(second, mems).hidden[..., 0]])


@torch.no_grad()
def reading(model):
    mems = model.keep(model.start_memory(2))
    _, mems = model.read(TEXT[:, :5], mems)
    out = model(TEXT[:, 5:7], mems)
    return torch.cat([out.log_probs, model(TEXT[:, 7:8], out.mems).log_probs], 1)


def halves(module, given, out):
    return out / 2


@contextmanager
def hooked(module):
    handle = module.register_forward_hook(halves)
    yield
    handle.remove()


@contextmanager
def hooked_before(module):
    handle = module.register_forward_pre_hook(lambda module, given: (given[0] / 2,))
    yield
    handle.remove()


@contextmanager
def replaced(module):
    # As the library accelerate does it.
    forward = module.forward
    module.forward = lambda x: forward(x) / 2
    yield
    del module.forward


@contextmanager
def hooked_everywhere(module):
    handle = register_module_forward_hook(
        lambda each, given, out: out / 2 if each is module else None
    )
    yield
    handle.remove()


@contextmanager
def halved(module):
    with torch.no_grad():
        module.weight /= 2
    yield
    with torch.no_grad():
        module.weight *= 2


@pytest.mark.slow
@pytest.mark.parametrize("first", range(len(MODELS)))
def test_what_hangs_on_a_linear_map_is_honoured_as_the_same_weights_are(first):
    model = made([*MODELS][first])
    maps = [
        (name, x)
        for name, x in model.named_modules()
        if isinstance(x, nn.Linear) and not isinstance(x, Softmax)
    ]
    assert len(maps) >= 8
    before = training(model), reading(model)
    ways = (hooked, hooked_before, replaced, hooked_everywhere)
    for place, (name, module) in enumerate(maps):
        # Each map in one of the ways; each model begins with another.
        way = ways[(place + first) % 4]
        with halved(module):
            expected = training(model), reading(model)
        if ".projs." not in name:
            assert not torch.equal(before[0], expected[0]), name
        with way(module):
            assert not is_plain(module, type(module))
            found = training(model), reading(model)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-10, atol=1e-10, msg=f"{name} {way.__name__}"
            )
    assert torch.equal(training(model), before[0])
    assert torch.equal(reading(model), before[1])


@torch.no_grad()
def test_what_a_hook_has_kept_stays_as_it_was(tiny_config):
    model = build_model(replace(tiny_config, init_std=0.3)).eval()
    kept, copies = [], []
    for layer in model.layers:
        inner = layer.feed_forward.inner
        inner.register_forward_hook(lambda module, given, out: kept.append(out))
        inner.register_forward_hook(lambda module, given, out: copies.append(out.clone()))
    model(torch.randint(model.config.vocab_size, (2, 5)))
    assert copies
    assert all(map(torch.equal, kept, copies))


def test_every_part_that_is_read_with_is_called(model):
    tokens = TEXT[:, :4]
    for name in ("", "embedding", "softmax", "layers.0", "layers.0.attention"):
        seen = []
        module = model.get_submodule(name)
        handle = module.register_forward_hook(lambda *given, to=seen: to.append(given))
        model(tokens, None, tokens)
        model(tokens)
        with torch.no_grad():
            model.head.log_probs(model.read(tokens, model.keep(model.start_memory(2)))[0])
        assert len(seen) == 3, name
        list(generate(model, [1, 2], length=3, seed=1))
        handle.remove()
        assert len(seen) == 6, name


def test_a_hook_on_the_softmax_changes_loss_distribution_and_what_is_drawn(model):
    if not isinstance(model.softmax, Softmax):
        pytest.skip("its logits are made cluster by cluster")
    with torch.no_grad():
        model.softmax.bias.fill_(-30.0)[5] = 30.0
        likeliest = model(TEXT[:, :4], None, TEXT[:, :4]).nll
        model.softmax.bias.zero_()

    def only_five(module, given, out):
        return out + torch.full((V,), -30.0).index_fill(0, torch.tensor(5), 30.0)

    model.softmax.register_forward_hook(only_five)
    torch.testing.assert_close(model(TEXT[:, :4], None, TEXT[:, :4]).nll, likeliest)
    assert list(generate(model, [1, 2], length=4, seed=1)) == [5] * 4


@pytest.mark.slow
@pytest.mark.compile
def test_wrapped_modules_are_compiled_and_exported_whole():
    torch.manual_seed(3)
    model = TransformerXL(replace(SMALL, init_std=0.2)).eval()

    class Twice(nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer

        def forward(self, x):
            return 2 * self.base_layer(x)

    plain = TEXT[:, :5]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(plain).log_probs, model(plain).log_probs)
    for layer in model.layers:
        layer.attention.qkv_proj = Twice(layer.attention.qkv_proj)
        layer.feed_forward.inner.register_forward_hook(halves)
    expected = model(plain).log_probs
    torch.testing.assert_close(compiled(plain).log_probs, expected)
    exported = torch.export.export(_LogProbs(model), (plain,)).module()
    torch.testing.assert_close(exported(plain), expected)


class _LogProbs(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens).log_probs


def test_making_a_model_draws_the_numbers_that_it_always_drew():
    config = replace(SMALL, d_embed=8, tie_embeddings=False)
    torch.manual_seed(7)
    model = TransformerXL(config)
    names = [name for name, _ in model.named_parameters()]
    assert names[2:4] == ["embedding.weight", "embedding.proj.weight"]
    assert names[-3:] == ["softmax.weight", "softmax.bias", "softmax.proj.weight"]
    torch.manual_seed(7)
    # Each linear map draws weights when it is made, which are drawn anew in the end; tables do not.
    nn.Linear(8, 16, bias=False)
    for _ in range(2):
        RelAttention(config)
        FeedForward(config)
    nn.Linear(8, 16, bias=False)
    for name in names[:3]:
        parameter = model.get_parameter(name)
        assert torch.equal(torch.empty(parameter.shape).normal_(0.0, config.init_std), parameter)
