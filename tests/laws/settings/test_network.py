"""Every setting of the network changes its results wherever it trains or reads, or is refused.

`MODEL` has a row for each: the settings beside which it counts, and another value.
"""

import dataclasses
import json
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from transformer_xl.config import AuthorsConfig, ModelConfig
from transformer_xl.config.checks import fields_of
from transformer_xl.inference.answers import features_of
from transformer_xl.inference.evaluate import WithMemory, evaluate
from transformer_xl.inference.generate import Sampling, generate
from transformer_xl.interop.export import Step
from transformer_xl.model import build_model
from transformer_xl.model.decoder import Decoder
from transformer_xl.model.quantizing import compact
from transformer_xl.model.segment import Lengths

LSTM = {"kind": "lstm", "n_head": 8, "d_inner": 2048}
MODEL = {
    # setting: beside which others, another value
    "kind": ({"n_head": 8, "d_inner": 2048}, "lstm"),
    "vocab_size": ({}, 29),
    "n_features": ({}, 3),
    "n_mixtures": ({"n_features": 3}, 2),
    "reset_at": ({}, 3),
    "completion_at": ({"reset_at": 3}, 5),
    "n_layer": ({}, 3),
    "n_head": ({}, 4),
    "d_model": ({}, 24),
    "d_head": ({}, 5),
    "d_inner": ({}, 20),
    "activation": ({}, "gelu"),
    "d_embed": ({}, 6),
    "attn_type": ({}, 2),
    "n_positions": ({"attn_type": 1, "n_positions": 30}, 3),
    "cutoffs": ({}, (5,)),
    "div_val": ({"cutoffs": (5,)}, 2),
    "mem_len": ({}, 3),
    "ext_len": ({}, 2),
    "attn_len": ({}, 3),
    "layer_attn_lens": ({"n_layer": 2}, (3, 30)),
    "clamp_len": ({}, 2),
    "start_memory": ({"mem_len": 30}, "zeros"),
    "norm_first": ({}, True),
    "gate": ({"norm_first": True}, "gru"),
    "norm": ({}, "rms"),
    "qk_norm": ({}, True),
    "key_offset": ({}, True),
    "scalable_softmax": ({}, 2),
    "embedding_residual": ({}, True),
    "input_recurrence": ({}, True),
    "enhanced_recurrence": ({}, True),
    "final_norm": ({}, True),
    "tie_biases": ({}, False),
    "tie_embeddings": ({}, False),
    "tie_projections": ({"d_embed": 6, "proj_init_std": 0.4}, True),
    "proj_same_dim": ({"cutoffs": (5,), "div_val": 2}, False),
    "sample_softmax": ({}, 5),
    "dropout": ({}, 0.3),
    "attn_dropout": ({}, 0.3),
    "qkv_dropout": ({}, 0.3),
    "embed_dropout": ({}, 0.3),
    "input_dropout": ({}, 0.3),
    "ff_dropout": ({}, 0.3),
    "output_dropout": ({}, 0.3),
    "variational_dropout": ({"dropout": 0.3}, True),
    "init": ({}, "uniform"),
    "init_range": ({"init": "uniform"}, 0.3),
    "embed_init": ({}, "uniform"),
    "embed_init_range": ({"embed_init": "uniform"}, 0.3),
    "init_std": ({}, 0.3),
    "proj_init_std": ({"d_embed": 6}, 0.3),
    "norm_eps": ({}, 2.0),
    "quirks": ({"attn_type": 2}, ("stored_positions",)),
}
# Of models that read no text; tests/laws/test_features.py and tests/train/test_recordings.py have
# their laws.
OF_RECORDINGS = {"n_features", "n_mixtures"}
QUIRKS = {
    "stored_positions": {"attn_type": 2},
    "swapped_ext_len": {"ext_len": 2, "mem_len": 3},
    "raw_queries": {"attn_type": 2, "norm_first": True},
    "exact_frequencies": {},
}


def test_every_setting_has_a_row():
    assert {*MODEL} == {*fields_of(ModelConfig)}
    for name, (base, value, *_) in MODEL.items():
        assert ModelConfig(**base | {name: value}) != ModelConfig(**base), name
    assert {*QUIRKS} == {*AuthorsConfig.__dataclass_fields__["quirks"].type.__args__[0].__args__}


def test_the_command_line_hands_every_setting_on(handed_on):
    assert handed_on("model", ModelConfig, MODEL) == {n: x for n, (_, x, *_) in MODEL.items()}


def tried(make):
    """Return what is made, or why it is refused."""
    try:
        return make(), None
    except ValueError as error:
        return None, str(error)


def differs(one, other):
    return one.shape != other.shape or not torch.equal(one, other)


# Settings that count in training alone; what reads a text has all weights and drops nothing.
IN_TRAINING = {
    *("sample_softmax", "dropout", "attn_dropout", "qkv_dropout"),
    *("embed_dropout", "input_dropout", "ff_dropout", "output_dropout", "variational_dropout"),
}


@pytest.mark.usefixtures("one_thread")
def test_a_setting_of_the_network_counts_in_training(recipe, numbers):
    same = []
    for name, (base, value) in MODEL.items():
        if name == "vocab_size":
            with pytest.raises(ValueError, match=r"model\.vocab_size=29 is not the size"):
                numbers(recipe(model={name: value}))
        elif name == "sample_softmax":
            # No training begins with it (tests/nn/test_limits.py).
            continue
        elif name in OF_RECORDINGS:
            with pytest.raises(ValueError, match=r"reads the arrays of data\.vocab='features'"):
                recipe(model=base | {name: value})
        elif not differs(*(numbers(recipe(model=x), 2) for x in (base, base | {name: value}))):
            same.append(name)
    assert not same


@pytest.mark.usefixtures("one_thread")
def test_a_setting_of_an_lstm_counts_or_is_refused(recipe, numbers):
    own, same = {"mem_len": 0, **LSTM}, []
    plain = numbers(recipe(model=own), 2)
    assert differs(plain, numbers(recipe(model=own, data={"reset_at": "a"}), 2))
    for name, (base, value) in MODEL.items():
        # What it remembers is a state; mem_len says how much warms it up in an evaluation.
        ignored = "kind", "vocab_size", "mem_len", "variational_dropout", "sample_softmax"
        if name in (*ignored, *OF_RECORDINGS):
            continue
        beside = {} if name in LSTM else base
        changed = {**beside, name: value}
        config, refused = tried(lambda changed=changed: recipe(model=own | changed))
        if refused:
            assert "has no effect with kind='lstm'" in refused
            assert any(refused.startswith(f"{each}=") for each in changed)
        elif not differs(numbers(recipe(model=own | beside), 2), numbers(config, 2)):
            same.append(name)
    assert not same


WIDE = ModelConfig(
    vocab_size=23, n_layer=2, n_head=2, d_model=16, d_inner=32, mem_len=6, init_std=0.4
)
TOKENS = torch.randint(23, (2, 16), generator=torch.Generator().manual_seed(3))


def made(settings):
    """A model; those with weights of the same shapes have the same weights."""
    torch.manual_seed(5)
    config = replace(WIDE, **settings)
    return build_model(config).eval()


def in_segments(model, kept=False, **lengths):
    mems = model.start_memory(len(TOKENS))
    mems = model.keep(mems) if kept else mems
    found = []
    for segment in TOKENS.split(5, 1):
        out = model(segment, mems, **lengths)
        mems = out.mems
        found.append(out.log_probs)
    return torch.cat(found, 1)


def drawn(model):
    return torch.tensor(
        [*generate(model, TOKENS[0], length=20, seed=1, sampling=Sampling(temperature=3.0))]
    )


def evaluated(model):
    result = evaluate(model, TOKENS[0].numpy(), WithMemory(segment_len=5))
    return torch.tensor(result.nll)


def stepped(model):
    decoder = Decoder.of(model, Lengths.of(model.config), model.start_memory(2))
    hidden = [decoder(TOKENS[:, n]) for n in range(TOKENS.shape[1])]
    return model.softmax.log_probs(torch.stack(hidden, 1))


def exported(model):
    one = Step(model)
    memory, found = one.start(2), []
    for n in range(TOKENS.shape[1]):
        log_probs, *memory = one(TOKENS[:, n, None], *memory)
        found.append(log_probs)
    return torch.cat(found, 1)


def classified(model):
    return features_of(model, TOKENS.tolist(), Lengths.of(model.config, segment_len=5))


PATHS = {
    "segments": in_segments,
    "keys and values": partial(in_segments, kept=True),
    "evaluation": evaluated,
    "generation": drawn,
    "decoder": stepped,
    "int8": lambda model: in_segments(compact(model, "int8"), kept=True),
    "export": exported,
    "classifier": classified,
}
# What only training, or only a call that reads the end of a segment again, takes.
BY_DESIGN = {("ext_len", path) for path in ("generation", "decoder", "export", "classifier")} | {
    # Features are what the softmax reads.
    *((name, "classifier") for name in ("cutoffs", "tie_embeddings", "tie_projections")),
    # It says what is counted.
    *(("completion_at", path) for path in PATHS if path != "evaluation"),
}
QUIRK_ROWS = {f"quirks: {quirk}": ("quirks", base, (quirk,)) for quirk, base in QUIRKS.items()}
READ = {
    **{
        name: (name, base, value)
        for name, (base, value) in MODEL.items()
        if name not in OF_RECORDINGS
    },
    **QUIRK_ROWS,
}


# Of these the shapes of the weights tell.
SHAPES = {
    *("vocab_size", "n_layer", "d_model", "d_head", "d_inner", "d_embed", "cutoffs", "div_val"),
}


@torch.no_grad()
@pytest.mark.parametrize("path", PATHS)
def test_a_setting_of_the_network_counts_wherever_a_text_is_read(path):
    @cache
    def read(settings, dtype):
        return PATHS[path](made(dict(settings)).to(dtype))

    def both(base, changed, dtype):
        return [read(tuple(settings.items()), dtype) for settings in (base, base | changed)]

    wrong = []
    for row in READ.keys() - SHAPES - IN_TRAINING:
        name, base, value = READ[row]
        in_last_digits = row.endswith("exact_frequencies")
        if in_last_digits and path in ("int8", "generation", "evaluation", "export", "classifier"):
            continue
        dtype = torch.float64 if in_last_digits else torch.float32
        found, refused = tried(partial(both, base, {name: value}, dtype))
        if refused:
            reasons = ("kind=", "attn_type=2 has absolute positions", "a step needs")
            assert any(reason in refused for reason in reasons), row
            continue
        counts = (name, path) not in BY_DESIGN
        counts &= not (row.endswith("swapped_ext_len") and ("ext_len", path) in BY_DESIGN)
        if differs(*found) != counts:
            wrong.append(row)
    assert not wrong


@torch.no_grad()
def test_what_is_dropped_or_drawn_in_training_changes_nothing_in_reading():
    for name in IN_TRAINING:
        base, value = MODEL[name]
        one, other = (in_segments(made(x)) for x in (base, base | {name: value}))
        assert not differs(one, other), name


@pytest.mark.slow
def test_transformers_keep_every_setting():
    pytest.importorskip("transformers", reason="needs pip install 'transformer-xl[hf]'")
    from transformer_xl.hf import TransformerXLConfig

    for name, base, value in READ.values():
        settings = dataclasses.asdict(WIDE) | base | {name: value}
        ours = TransformerXLConfig(**settings)
        again = TransformerXLConfig(**json.loads(ours.to_json_string()))
        assert ours.to_model_config() == again.to_model_config() == ModelConfig(**settings)
