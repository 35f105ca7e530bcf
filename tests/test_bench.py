"""What is counted is counted right, and what is measured adds up."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from transformer_xl.apps.bench import (
    SLOWDOWNS,
    evaluation_speed,
    measure,
    profile,
    profiling,
    speed,
    training,
    windows,
    with_vocabulary,
)
from transformer_xl.apps.bench.speed import forward_flops, token_bytes, training_flops
from transformer_xl.config import Config, DataConfig, EvalConfig, ModelConfig, TrainConfig
from transformer_xl.ops import timing, use_backend

CPU = torch.device("cpu")
BASE = ModelConfig(
    vocab_size=60, n_layer=3, n_head=2, d_model=16, d_inner=24, mem_len=5, dropout=0.0
)
VARIANTS = {
    "the paper": {},
    "no memory": {"mem_len": 0},
    "other widths": {"d_head": 5, "d_embed": 6},
    "learned relative positions": {"attn_type": 1, "n_positions": 9},
    "limited attention": {"attn_len": 4},
    "adaptive softmax": {"cutoffs": (20, 40), "div_val": 2},
    "sampled softmax": {"sample_softmax": 7},
    "gated units": {"activation": "swiglu"},
    "gates": {"norm_first": True, "gate": "gru"},
    "sinusoids": {"attn_type": 2},
}


@pytest.fixture(autouse=True)
def _quick(one_thread, monkeypatch):
    for name in ("CEILING_WIDTH", "READING_WIDTH"):
        monkeypatch.setattr(timing, name, {"cpu": 64})
    monkeypatch.setattr(speed, "TOKENS", 3)


def recipe(model=None, **settings):
    settings = {"batch_size": 4, "segment_len": 4, "precision": "float32", **settings}
    return Config(
        model=replace(BASE, **(model or {})),
        data=DataConfig(),
        train=TrainConfig(**settings),
        eval=EvalConfig(batch_size=2, segment_len=3),
    )


def test_the_operations_of_one_shape_are_those_counted_by_hand():
    # A layer for one token: four projections, the feed-forward, three products with 6 keys.
    token = 4 * 16 * 16 + 2 * 16 * 24 + 3 * 16 * 6
    # Keys and values of the memory for each stream, positions once.
    memory = 2 * (5 * 2 * 16 * 16) + 6 * 16 * 16
    softmax = 2 * 16 * 60
    assert forward_flops(BASE, 2, 1, 5, 1, is_kept=True) == 2 * (3 * 2 * token + softmax)
    assert forward_flops(BASE, 2, 1, 5, 1, is_kept=False) == 2 * (
        3 * (2 * token + memory) + softmax
    )
    assert training_flops(BASE, 2, 1, 5, 1) == 2 * (3 * (3 * 2 * token + 2 * memory) + 3 * softmax)
    # Weights, then the keys and values of five positions, then the softmax.
    numbers = 3 * (4 * 16 * 16 + 2 * 16 * 24 + 2 * 5 * 16) + 16 * 60
    assert token_bytes(BASE, 5, 4) == 4 * numbers


class _WholeModel:
    """Counts for no module in particular."""

    parents = ("Global",)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("name", [name for name in VARIANTS if name[:3] not in ("sin", "sam")])
def test_the_count_is_that_of_torch_without_what_is_thrown_away(name):
    B, T = 32, 4
    config = recipe(VARIANTS[name], batch_size=B)
    model = config.model
    M, width = model.mem_len, model.n_head * model.head_width
    _, step = training(config, CPU)
    # In place, which torch does not count.
    addmm = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
    counter = FlopCounterMode(display=False, custom_mapping=addmm)  # pyright: ignore
    # It hangs hooks on all modules, which are called then as others are that have hooks.
    counter.mod_tracker = _WholeModel()  # pyright: ignore
    with use_backend("reference"), counter:
        step()
    S = min(M + T, T - 1 + (model.attn_len or M + T))
    seen = sum(min(M + i + 1, model.attn_len or M + T) for i in range(T))
    hidden = model.n_layer * B * 3 * width * (T * S - seen)
    # Nobody asks for the gradient of the memory, but the reference may compute it.
    of_memory = 2 * model.n_layer * B * M * model.d_model * 2 * width
    found = counter.get_total_flops() - 6 * hidden
    expected = training_flops(model, B, T, M, T)
    # How many words of each cluster are drawn is chance.
    tolerance = 0.02 * expected if model.cutoffs else 0
    assert min(abs(found - expected), abs(found - of_memory - expected)) <= tolerance


def test_every_kind_of_model_is_measured():
    for name, settings in VARIANTS.items():
        found = measure(recipe(settings), steps=2)
        for part, n_tokens in (("training", 16), ("evaluation", 6), ("generation", 1)):
            row = found[part]
            low, high = row["seconds_range"]
            assert 0 < low <= row["seconds"] <= high, (name, part)
            assert row["tokens_per_second"] == pytest.approx(n_tokens / row["seconds"])
        limit, row = found["ceiling"], found["training"]
        rate = row["gflop"] / row["seconds"]
        assert row["share_of_ceiling"] == pytest.approx(rate / limit["gflop_per_s"]), name
        assert row["peak_mb"] >= row["mb_at_first"] > 0, name


def test_the_memory_is_full_from_the_first_step_on():
    config = recipe({"ext_len": 2}, accumulate=2, loss="half")
    state, step = training(config, CPU)
    lengths = []
    for _ in range(3):
        lengths.append([len(memory) for memory in state.mems if memory is not None])
        step()
    assert lengths == [[5, 5]] * 3
    assert state.step == 3


@pytest.mark.parametrize("average", ["none", "ema", "tail"])
def test_a_step_is_one_of_the_end_of_a_run(average):
    config = recipe(stages=((0.0, 2, 0), (0.3, 3, 9), (0.6, 4, 5)), average=average)
    state, step = training(config, CPU)
    shapes = []
    forward = state.model.forward

    def noting(tokens, mems, *rest, **settings):
        shapes.append((tokens.shape[1], len(mems), settings["mem_len"]))
        return forward(tokens, mems, *rest, **settings)

    state.model.forward = noting
    for _ in range(3):
        step()
    assert shapes == [(4, 5, 5)] * 3
    assert (state.average is None) == (average == "none")
    if state.average is not None:
        assert state.average.n_averaged == 3


def test_only_a_transformer_xl_is_measured():
    for way in (
        lambda config: measure(config, steps=1),
        lambda config: profile(config, steps=1),
        lambda config: evaluation_speed(config.model, (5,)),
    ):
        with pytest.raises(
            ValueError, match=r"model.kind='lstm': only .* 'transformer_xl' can be mea"
        ):
            way(replace(recipe(), model=ModelConfig(kind="lstm", vocab_size=60)))


@pytest.mark.slow
def test_a_profile_adds_up_to_the_step_and_leaves_the_functions_as_they_were():
    functions = [getattr(owner, name) for owner, name, _ in profiling.SCOPES]
    # Without dropout a kernel makes products and softmax in one.
    found = profile(recipe({"attn_dropout": 0.1}, accumulate=2), steps=1)
    parts = {row["part"]: row for row in found["parts"]}
    assert [*parts] == [*profiling.PARTS]
    ms = sum(row["ms"] for row in parts.values())
    assert ms == pytest.approx(sum(row["ms"] for row in found["operators"]))
    # The rest is what noting the step itself takes, by another clock.
    assert 0.2 < ms / 1e3 / found["seconds_profiled"] < 1.02
    assert sum(row["share"] for row in parts.values()) == pytest.approx(1)
    assert all(row["ms"] == row["forward_ms"] + row["backward_ms"] for row in parts.values())
    # An operator is where it ran, and its gradient too.
    learning = [
        part for part in parts if part not in ("memory", "adding up gradients", "optimizer")
    ]
    assert all(parts[part]["forward_ms"] > 0 for part in learning)
    assert all(parts[part]["backward_ms"] > 0 for part in learning)
    assert parts["optimizer"]["forward_ms"] > 0 == parts["optimizer"]["backward_ms"]
    assert parts["adding up gradients"]["backward_ms"] > 0
    rows = {(row["operator"], row["pass"]): row for row in found["operators"]}
    looked_up = rows["aten::embedding", "forward"]
    assert (looked_up["part"], looked_up["calls"]) == ("embedding", 2)
    assert rows["EmbeddingBackward0", "backward"]["part"] == "embedding"
    assert [getattr(owner, name) for owner, name, _ in profiling.SCOPES] == functions
    with pytest.raises(KeyboardInterrupt), profiling._scopes():
        raise KeyboardInterrupt
    assert [getattr(owner, name) for owner, name, _ in profiling.SCOPES] == functions


def test_every_scope_is_entered_by_some_kind_of_training(monkeypatch):
    entered = set()

    def noting(function, scope):
        def noted(*args, **kwargs):
            entered.add(function)
            return function(*args, **kwargs)

        return noted

    monkeypatch.setattr(profiling, "_scoped", noting)
    names = {getattr(owner, name): (owner, name) for owner, name, _ in profiling.SCOPES}
    kinds = ({}, VARIANTS["sinusoids"], VARIANTS["adaptive softmax"], {"norm": "rms"})
    steps = [training(recipe(kind), CPU)[1] for kind in kinds]
    with profiling._scopes():
        for step in steps:
            step()
    assert [name for function, name in names.items() if function not in entered] == []


def test_clipping_is_part_of_the_optimizer(monkeypatch):
    # Its own operators would hide those of clipping.
    monkeypatch.setattr(profiling.Optimizer, "step", lambda *_, **__: 0.0)
    found = profile(recipe(clip_norm=1e-6), steps=1)
    parts = {row["operator"]: row["part"] for row in found["operators"]}
    assert parts["aten::_foreach_norm"] == parts["aten::_foreach_mul_"] == "optimizer"


def test_what_cannot_be_measured_is_explained():
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        measure(recipe(), steps=0)
    with pytest.raises(ValueError, match="steps=-1 must be at least 1"):
        profile(recipe(), steps=-1)
    with pytest.raises(ValueError, match=r"profile with --train.compile False"):
        profile(recipe(compile=True), steps=1)


def test_a_vocabulary_that_is_left_to_the_text_is_guessed():
    for data, size in (
        ({}, 256),
        ({"vocab": "chars"}, 100),
        ({"vocab": "bpe"}, 4096),
        ({"vocab": "bpe", "vocab_size": 512}, 512),
        ({"vocab": "words"}, 10_000),
        ({"vocab": "words", "name": "wikitext-103"}, 267_735),
        ({"vocab": "words", "vocab_size": 512, "name": "wikitext-103"}, 512),
        ({"vocab": "bytes", "name": "wikitext-103"}, 256),
    ):
        config = replace(recipe({"vocab_size": 0}), data=DataConfig(**data))
        assert with_vocabulary(config).model.vocab_size == size, data
        known = replace(config, model=replace(config.model, vocab_size=7))
        assert with_vocabulary(known) == known, data


def test_both_ways_of_evaluating_are_timed_in_turns(monkeypatch):
    order = []
    for name in ("_window_step", "_memory_step"):
        make = getattr(windows, name)

        def noting(model, first, *rest, name=name, make=make):
            config = model.config
            expected = (3, 0, None) if name == "_window_step" else (0, 6, 6)
            assert (config.attn_type, config.mem_len, config.attn_len) == expected
            step = make(model, first, *rest)
            return lambda: (order.append((name, rest[-1])), step())

        monkeypatch.setattr(windows, name, noting)
    found = evaluation_speed(BASE, (6,), segment_len=4, batch_size=2, windows=(1, 3), rounds=2)
    turn = [*[("_memory_step", 2)] * 5, ("_window_step", 1), ("_window_step", 3)]
    assert order == [("_memory_step", 2)] * 2 + turn * 3
    (row,) = found["rows"]
    assert row["paper"] is None
    assert row["slowdown"] == pytest.approx(row["window"]["seconds"] / row["memory"]["seconds"])
    for part in (row["window"], row["memory"]):
        low, high = part["seconds_range"]
        assert 0 < low <= part["seconds"] <= high
    assert row["window"]["batch_size"] in (1, 3)


def test_a_window_step_predicts_as_many_tokens_as_it_is_counted_for(monkeypatch):
    counted = []
    window_nll = windows.window_nll

    def noting(*args, **settings):
        counted.append(window_nll(*args, **settings))

    monkeypatch.setattr(windows, "window_nll", noting)
    evaluation_speed(BASE, (5,), segment_len=3, windows=(1, 4), rounds=1)
    assert [len(nll) for nll in counted] == [1, 4, 1, 4]


def test_the_memory_of_a_step_is_full_and_stays_so(monkeypatch):
    lengths = []
    model = windows._with_memory(BASE, 6, CPU)
    step = windows._memory_step(model, 4, 1)
    forward = model.forward

    def noting(tokens, mems, *rest, **settings):
        lengths.append(len(mems))
        return forward(tokens, mems, *rest, **settings)

    monkeypatch.setattr(model, "forward", noting)
    with torch.no_grad():
        for _ in range(3):
            step()
    assert lengths == [6, 6, 6]


def test_the_paper_s_numbers_stand_beside_its_lengths():
    assert SLOWDOWNS == {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


def test_counts_of_the_evaluation_speed_are_checked():
    for name, value in (
        ("attn_lens", (5, 0)),
        ("attn_lens", ()),
        ("windows", (0,)),
        ("rounds", 0),
        ("segment_len", 0),
    ):
        settings = {"attn_lens": (5,), name: value}
        with pytest.raises(ValueError, match=f"{name}=.* must be at least 1 each"):
            evaluation_speed(BASE, **settings)
