from dataclasses import replace
from inspect import unwrap
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from transformer_xl.config import ModelConfig
from transformer_xl.nn import KeptMemory, Memory, TransformerXL

OPTIONS = {
    "d_embed": (None, 6),
    "tie_embeddings": (True, False),
    "tie_projections": (True, False),
    "tie_biases": (True, False),
    "norm_first": (True, False),
    "final_norm": (True, False),
}
COMBINATIONS = [dict(zip(OPTIONS, values, strict=True)) for values in product(*OPTIONS.values())]
TEXT8, ENWIK8 = {"vocab_size": 27}, {"vocab_size": 204}
BASE = {"n_layer": 12, "n_head": 8, "d_model": 512, "d_head": 64, "d_inner": 2048}
LARGE = {"n_layer": 24, "n_head": 8, "d_model": 1024, "d_head": 128, "d_inner": 3072}


@pytest.fixture
def model(tiny_config):
    # Larger weights than at the beginning of a training, so that everything has an effect.
    return TransformerXL(replace(tiny_config, init_std=0.3)).eval()


def tokens(B=2, T=4):
    return torch.randint(31, (B, T))


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (ENWIK8 | BASE, 41_055_436),
        (ENWIK8 | LARGE, 277_231_820),
        (TEXT8 | BASE, 40_964_635),
        (TEXT8 | LARGE, 277_050_395),
    ],
    ids=["enwik8 base", "enwik8 large", "text8 base", "text8 large"],
)
def test_the_published_models_have_the_published_numbers_of_parameters(settings, count):
    with torch.device("meta"):
        model = TransformerXL(ModelConfig(**settings))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_a_pair_of_biases_for_each_layer_is_the_only_difference(tiny_config):
    tied, untied = (TransformerXL(replace(tiny_config, tie_biases=tie)) for tie in (True, False))
    assert tied.content_bias.shape == tied.position_bias.shape == (1, 2, 8)
    assert untied.content_bias.shape == untied.position_bias.shape == (3, 2, 8)
    assert dict(tied.named_parameters()).keys() == dict(untied.named_parameters()).keys()


def test_each_layer_has_the_biases_of_its_own(tiny_config):
    model = TransformerXL(replace(tiny_config, tie_biases=False, init_std=0.3)).eval()
    segment = tokens()
    before = model(segment).mems.states
    with torch.no_grad():
        model.content_bias[1] += 1
    after = model(segment).mems.states
    # The memory holds the inputs of the layers.
    assert torch.equal(before[1], after[1])
    assert not torch.allclose(before[2], after[2])


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda options: str([*options.values()]))
def test_every_parameter_has_its_line_in_the_table_of_initial_weights(tiny_config, options):
    model = TransformerXL(
        replace(tiny_config, **options, vocab_size=400, init_std=0.5, proj_init_std=0.1)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and "_bias" not in name:
            assert not parameter.any(), name
            continue
        mean = 1.0 if "norm" in name else 0.0
        std = 0.1 if name in ("embedding.proj.weight", "softmax.proj.weight") else 0.5
        # Six standard deviations of what is measured on so many draws.
        n = parameter.numel()
        assert abs(parameter.mean() - mean) < 6 * std / n**0.5, name
        assert abs(parameter.std() - std) < 6 * std / (2 * n - 2) ** 0.5, name


def test_a_parameter_outside_the_table_is_an_error(tiny_config):
    model = TransformerXL(tiny_config)
    model.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(StopIteration):
        model.init_weights()


def test_the_seed_decides_the_weights(tiny_config):
    def drawn(seed):
        torch.manual_seed(seed)
        return TransformerXL(tiny_config).embedding.weight

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


def test_the_output_holds_what_was_asked_for(model):
    segment, targets = tokens(), tokens()
    out, scored = model(segment), model(segment, targets=targets)
    assert (out.nll, out.loss) == (None, None)
    assert scored.log_probs is None
    assert torch.equal(out.hidden, scored.hidden)
    assert out.hidden.shape == (2, 4, 16)
    assert scored.nll.dtype == out.log_probs.dtype == torch.float32
    expected = -out.log_probs.gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(scored.nll, expected)
    assert scored.loss == scored.nll.mean()
    assert scored.loss is scored.loss
    assert isinstance(out.mems, Memory)


def test_reading_is_the_model_without_its_softmax(model):
    segment = tokens()
    out, (hidden, mems) = model(segment), model.read(segment)
    assert torch.equal(hidden, out.hidden)
    assert all(map(torch.equal, mems.states, out.mems.states))


def test_the_memory_of_a_layer_is_its_input_and_the_last_output_is_not_kept(model):
    segment = tokens(T=5)
    out = model(segment)
    assert len(out.mems.states) == 3
    assert torch.equal(out.mems.states[0], model.embedding(segment))
    assert not any(torch.equal(state, out.hidden) for state in out.mems.states)


@pytest.mark.parametrize("mem_len", [0, 1, 3, 5, 9])
def test_the_memory_grows_to_its_length_and_not_beyond(tiny_config, mem_len):
    model = TransformerXL(replace(tiny_config, mem_len=mem_len))
    mems = None
    for read in (4, 8, 12):
        mems = model(tokens(), mems).mems
        assert len(mems) == min(read, mem_len)


def test_a_text_begins_with_an_empty_memory_or_with_zeros(tiny_config):
    empty = TransformerXL(tiny_config).double()
    zeros = TransformerXL(replace(tiny_config, start_memory="zeros")).double()
    assert len(empty.start_memory(2)) == 0
    assert len(empty.start_memory(2, mem_len=7)) == 0
    assert [len(zeros.start_memory(2, mem_len=M)) for M in (None, 7, 0)] == [5, 7, 0]
    for mems in (empty.start_memory(4), zeros.start_memory(4)):
        assert (mems.batch_size, len(mems.states), mems.forgotten) == (4, 3, None)
        assert all(x.dtype == torch.float64 and not x.any() for x in mems.states)


@pytest.mark.parametrize("start_memory", ["empty", "zeros"])
def test_no_memory_is_the_memory_at_the_start(tiny_config, start_memory):
    model = TransformerXL(replace(tiny_config, start_memory=start_memory, init_std=0.3)).eval()
    segment = tokens()
    assert torch.equal(model(segment).hidden, model(segment, model.start_memory(2)).hidden)
    other = {"empty": "zeros", "zeros": "empty"}[start_memory]
    twin = TransformerXL(replace(model.config, start_memory=other)).eval()
    twin.load_state_dict(model.state_dict())
    assert not torch.allclose(twin(segment).hidden, model(segment).hidden)


@pytest.mark.parametrize("lengths", [{"mem_len": 2}, {"attn_len": 3}, {"clamp_len": 1}], ids=str)
@pytest.mark.parametrize("is_kept", [False, True])
@torch.no_grad()
def test_a_length_given_with_the_call_is_that_of_a_model_made_with_it(model, lengths, is_kept):
    other = TransformerXL(replace(model.config, **lengths)).eval()
    other.load_state_dict(model.state_dict())
    config = model.config
    segments = [tokens() for _ in range(3)]

    def last(model, **lengths):
        mems = model.start_memory(2)
        mems = model.keep(mems) if is_kept else mems
        for segment in segments:
            out = model(segment, mems, **lengths)
            mems = out.mems
        return out.hidden

    assert torch.equal(last(model, **lengths), last(other))
    assert not torch.allclose(last(model), last(other))
    assert model.config == config


def test_dropout_is_where_the_paper_has_it(tiny_config, monkeypatch):
    places = []

    def spy(x, p=0.5, training=True, inplace=False):
        places.append((tuple(x.shape), p if training else 0.0))
        return x

    monkeypatch.setattr(F, "dropout", spy)
    model = TransformerXL(replace(tiny_config, n_layer=2, dropout=0.3))
    mems = model.start_memory(2).extend([torch.zeros(2, 5, 16)] * 2, 5)
    model(tokens(), mems)
    words, positions, inner = ((2, 4, 16), 0.3), ((9, 16), 0.3), ((2, 4, 32), 0.3)
    layer = [words, inner, words]
    assert places == [words, positions, *layer, *layer, words]

    places.clear()
    model.eval()(tokens(), mems)
    assert {p for _, p in places} == {0.0}


def test_dropout_changes_the_training_and_nothing_else(tiny_config):
    model = TransformerXL(replace(tiny_config, dropout=0.2, attn_dropout=0.2))
    segment = tokens()
    assert not torch.equal(model(segment).hidden, model(segment).hidden)
    model.eval()
    assert torch.equal(model(segment).hidden, model(segment).hidden)


def test_the_last_normalization_is_an_option(tiny_config):
    config = replace(tiny_config, norm_first=True, init_std=0.3)
    plain, normed = TransformerXL(config), TransformerXL(replace(config, final_norm=True))
    normed.load_state_dict(plain.state_dict(), strict=False)
    segment = tokens()
    expected = F.layer_norm(plain(segment).hidden, (16,), normed.final_norm.weight)
    torch.testing.assert_close(normed(segment).hidden, expected)


@torch.no_grad()
def test_keeping_keys_and_values_leaves_the_memory_as_it_is(model):
    mems = model(tokens()).mems.reset([1])
    kept = model.keep(mems)
    assert isinstance(kept, KeptMemory)
    assert (len(kept), kept.batch_size, kept.forgotten.tolist()) == (4, 2, [0, 4])
    for layer, state, keys in zip(model.layers, mems.states, kept.keys, strict=True):
        assert torch.equal(keys, layer.keys_and_values(state)[0].permute(2, 0, 1, 3))


def test_a_vocabulary_without_a_size_is_an_error(tiny_config):
    with pytest.raises(ValueError, match="vocab_size=0 must be the size of a vocabulary"):
        TransformerXL(replace(tiny_config, vocab_size=0))


def test_wrong_shapes_are_named(model):
    # Unwrapped: the check of shapes in signatures, where it is on, refuses them before we can.
    forward = unwrap(TransformerXL.forward)
    with pytest.raises(ValueError, match=r"targets of shape \(2, 3\) .* the tokens, \(2, 4\)"):
        forward(model, tokens(), targets=tokens(T=3))
    read = unwrap(TransformerXL.read)
    with pytest.raises(ValueError, match=r"tokens of shape \(4,\) must be \(streams, length\)"):
        read(model, tokens()[0])
    with pytest.raises(ValueError, match=r"tokens of shape \(2, 0\) .* not empty"):
        model.read(tokens(T=0))


def test_a_memory_of_other_streams_is_named(model):
    mems = model(tokens(B=3)).mems
    with pytest.raises(ValueError, match="memory holds 3 streams and the segment 2"):
        model(tokens(), mems)


def test_keys_and_values_are_refused_while_the_weights_may_change(model):
    kept = model.keep(model.start_memory(2))
    with pytest.raises(ValueError, match=r"under torch\.no_grad\(\)"):
        model(tokens(), kept)


@pytest.mark.parametrize("lengths", [{"mem_len": -1}, {"attn_len": 0}, {"clamp_len": -1}], ids=str)
def test_a_length_out_of_range_is_named(model, lengths):
    ((name, value),) = lengths.items()
    with pytest.raises(ValueError, match=f"{name}={value} must be at least"):
        model(tokens(), **lengths)
