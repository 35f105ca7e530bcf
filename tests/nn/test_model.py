import copy
import re
from dataclasses import replace

import pytest
import torch
from tests.nn.conftest import tokens

from transformer_xl.config import ModelConfig
from transformer_xl.model import Memory, TransformerXL

TYPES = [
    {"attn_type": 1, "n_positions": 7, "tie_biases": False},
    {"attn_type": 2},
    {"attn_type": 3, "n_positions": 7, "norm_first": True},
]
MODERN = {"norm": "rms", "activation": "geglu", "qk_norm": True, "final_norm": True}
ADAPTIVE = [
    {"cutoffs": (40, 90)},
    {"cutoffs": (40, 90), "div_val": 2, "tie_projections": (False, True, False)},
    {"cutoffs": (40, 90), "d_embed": 6, "tie_embeddings": False},
    {"div_val": 2, "proj_same_dim": False, "tie_embeddings": False},
]
TEXT8, ENWIK8 = {"vocab_size": 27}, {"vocab_size": 204}
BASE = {"n_layer": 12, "n_head": 8, "d_model": 512, "d_head": 64, "d_inner": 2048}
LARGE = {"n_layer": 24, "n_head": 8, "d_model": 1024, "d_head": 128, "d_inner": 3072}
WT103 = {
    "vocab_size": 267_735,
    "cutoffs": (20_000, 40_000, 200_000),
    "tie_projections": (False, True, True, True),
}
WT103_BASE = WT103 | {"n_layer": 16, "n_head": 10, "d_model": 410, "d_inner": 2100}
WT103_LARGE = WT103 | {"n_layer": 18, "n_head": 16, "d_inner": 4096, "div_val": 4, "d_model": 1024}
NVIDIA = WT103 | {"n_layer": 16, "cutoffs": (19_997, 39_997, 199_997)}
UNTIED = {"tie_biases": False}


@pytest.fixture
def model(tiny_config):
    # Larger weights than at the beginning of a training, so that everything has an effect.
    return TransformerXL(replace(tiny_config, init_std=0.3)).eval()


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (ENWIK8 | BASE, 41_055_436),
        (ENWIK8 | LARGE, 277_231_820),
        (TEXT8 | BASE, 40_964_635),
        (TEXT8 | LARGE, 277_050_395),
        (WT103_BASE, 151_107_538),
        (WT103_BASE | UNTIED, 151_119_838),
        # As fairseq prints it, with its own vocabulary.
        (WT103_BASE | UNTIED | {"vocab_size": 267_744}, 151_123_537),
        (WT103_LARGE, 285_170_506),
        (WT103_LARGE | UNTIED, 285_205_322),
        (NVIDIA, 191_950_298),
        (NVIDIA | UNTIED, 191_965_658),
    ],
    ids=lambda value: "" if isinstance(value, dict) else f"{value:_}",
)
def test_the_published_models_have_the_published_numbers_of_parameters(settings, count):
    with torch.device("meta"):
        model = TransformerXL(ModelConfig(**settings))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def spread(weight):
    """The standard deviation, and the largest size in units of it: 1.73 where it is uniform."""
    weight = weight.detach()
    return float(weight.std()), float(weight.abs().max() / weight.std())


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("settings", "of_words"),
    [
        ({"init": "uniform"}, 0.3),
        ({"init": "uniform", "embed_init": "uniform", "embed_init_range": 0.02}, 0.02),
        ({"init": "uniform", "embed_init": "normal"}, None),
    ],
)
def test_uniform_weights_are_within_their_range(tiny_config, settings, of_words, is_tied):
    others = {"init_range": 0.3, "init_std": 0.5, "tie_embeddings": is_tied, "d_model": 64}
    model = TransformerXL(replace(tiny_config, **settings, **others, vocab_size=400, d_head=8))
    named = dict(model.named_parameters())
    limits = {"embedding.weight": of_words, "layers.0.attention.qkv_proj.weight": 0.3}
    if not is_tied:
        limits["softmax.weight"] = 0.3
    for name, limit in limits.items():
        std, largest = spread(named[name])
        assert std == pytest.approx(0.5 if limit is None else limit / 3**0.5, rel=0.05), name
        assert (largest < 1.8) == (limit is not None), name
    assert spread(named["layers.0.attention_norm.weight"])[1] > 1.8


@pytest.mark.parametrize(
    "options",
    [*TYPES, *ADAPTIVE, MODERN, {"d_embed": 6, "tie_embeddings": False, "tie_biases": False}],
    ids=lambda options: str([*options.values()]),
)
def test_every_parameter_has_its_line_in_the_table_of_initial_weights(tiny_config, options):
    model = TransformerXL(
        replace(tiny_config, **options, vocab_size=400, init_std=0.5, proj_init_std=0.1)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and name not in ("content_bias", "position_bias"):
            assert not parameter.any(), name
            continue
        mean = 1.0 if "norm" in name else 0.0
        std = 0.1 if re.match(r"(embedding|softmax)\.projs?\.", name) else 0.5
        # Six standard deviations of what is measured on so many draws.
        n = parameter.numel()
        assert abs(parameter.mean() - mean) < 6 * std / n**0.5, name
        assert abs(parameter.std() - std) < 6 * std / (2 * n - 2) ** 0.5, name


def test_the_output_holds_what_was_asked_for(model):
    segment, targets = tokens(), tokens()
    out, scored = model(segment), model(segment, targets=targets)
    assert (out.nll, out.loss) == (None, None)
    assert scored.log_probs is None
    assert torch.equal(out.hidden, scored.hidden)
    assert out.hidden.shape == (2, 4, 16)
    assert scored.nll.dtype == out.log_probs.dtype == torch.float32
    assert scored.loss == scored.nll.mean()
    assert scored.loss is scored.loss
    assert isinstance(out.mems, Memory)


def test_the_memory_of_a_layer_is_its_input_and_the_last_output_is_not_kept(model):
    segment = tokens(T=5)
    out = model(segment)
    assert len(out.mems.states) == 3
    assert torch.equal(out.mems.states[0], model.embedding(segment))
    assert not any(torch.equal(state, out.hidden) for state in out.mems.states)


def test_a_text_begins_with_an_empty_memory_or_with_zeros(tiny_config):
    empty = TransformerXL(tiny_config).double()
    zeros = TransformerXL(replace(tiny_config, start_memory="zeros")).double()
    assert len(empty.start_memory(2)) == 0
    assert len(empty.start_memory(2, mem_len=7)) == 0
    assert [len(zeros.start_memory(2, mem_len=M)) for M in (None, 7, 0)] == [5, 7, 0]
    for mems in (empty.start_memory(4), zeros.start_memory(4)):
        assert (mems.batch_size, len(mems.states), mems.forgotten) == (4, 3, None)
        assert all(x.dtype == torch.float64 and not x.any() for x in mems.states)


@pytest.mark.parametrize("lengths", [{"mem_len": 2}, {"attn_len": 3}, {"clamp_len": 1}], ids=str)
@torch.no_grad()
def test_a_length_given_with_the_call_is_that_of_a_model_made_with_it(model, lengths):
    other = TransformerXL(replace(model.config, **lengths)).eval()
    other.load_state_dict(model.state_dict())
    config = model.config
    segments = [tokens() for _ in range(3)]

    def last(model, **lengths):
        mems = model.keep(model.start_memory(2))
        for segment in segments:
            out = model(segment, mems, **lengths)
            mems = out.mems
        return out.hidden

    assert torch.equal(last(model, **lengths), last(other))
    assert not torch.allclose(last(model), last(other))
    assert model.config == config


def _optimized(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _loaded(model):
    model.load_state_dict({name: x * 1.5 for name, x in model.state_dict().items()})


def _written_over(model):
    for layer in model.layers:
        # Which PyTorch does not count as a change.
        layer.attention.r_proj.weight.data.mul_(1.5)


@pytest.mark.parametrize(
    "change",
    [_optimized, _loaded, _written_over, lambda model: model.double()],
)
def test_positions_are_projected_anew_when_the_weights_have_changed(model, change):
    segment = tokens()

    def read(model):
        with torch.no_grad():
            return model(segment, model.keep(model.start_memory(2))).hidden

    read(model)
    change(model)
    assert torch.equal(read(model), read(copy.deepcopy(model)))


def test_a_vocabulary_without_a_size_is_an_error(tiny_config):
    with pytest.raises(ValueError, match="vocab_size=0 must be the size of a vocabulary"):
        TransformerXL(replace(tiny_config, vocab_size=0))


@pytest.mark.parametrize(
    ("T", "lengths", "most"),
    [
        (3, {}, ""),
        (0, {"ext_len": 4}, ", but for the first 4"),
        (2, {"context": 1}, ", but for the first 1"),
        (3, {"context": 0, "ext_len": 4}, ""),
    ],
    ids=str,
)
def test_targets_of_another_length_are_named_with_what_may_be_missing(model, T, lengths, most):
    message = re.escape(
        f"targets of shape (2, {T}) must have the shape of the tokens, (2, 4){most}"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        model(tokens(), targets=tokens(T=T), **lengths)


def test_keys_and_values_are_refused_while_the_weights_may_change(model):
    kept = model.keep(model.start_memory(2))
    with pytest.raises(ValueError, match=r"under torch\.no_grad\(\)"):
        model(tokens(), kept)
