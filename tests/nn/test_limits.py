"""What cannot fit into any machine is refused at once, with the bytes that it would take."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import transformer_xl as txl
from transformer_xl.config import Config, DataConfig, ModelConfig, TrainConfig
from transformer_xl.config.device import total_memory
from transformer_xl.data import train_vocab
from transformer_xl.model import build_model
from transformer_xl.model.limits import (
    full_memory,
    least_weights,
    readable,
    require_bytes,
    require_training,
)

CPU = torch.device("cpu")
TINY = ModelConfig(vocab_size=11, n_layer=2, n_head=2, d_model=8, d_inner=12, mem_len=4)
KINDS = [
    TINY,
    replace(TINY, d_model=64, d_inner=256, vocab_size=500, n_layer=4),
    replace(TINY, d_model=64, d_head=48, d_embed=16, vocab_size=500, tie_embeddings=False),
    replace(TINY, d_model=64, cutoffs=(20, 60), div_val=2, vocab_size=500, d_inner=100),
    replace(TINY, d_model=64, attn_type=1, n_positions=200),
    replace(TINY, d_model=64, attn_type=2),
    replace(TINY, d_model=64, attn_type=3, n_positions=200),
    replace(TINY, d_model=64, activation="swiglu", norm_first=True, gate="gru", norm="rms"),
    ModelConfig(kind="lstm", n_layer=2, d_model=64, vocab_size=500, mem_len=0),
]


@pytest.fixture
def model() -> txl.TransformerXL:
    torch.manual_seed(0)
    return build_model(TINY).eval()


@pytest.mark.parametrize("config", KINDS, ids=range(len(KINDS)))
def test_the_weights_that_are_counted_are_there_and_nearly_all(config: ModelConfig) -> None:
    whole = sum(x.numel() for x in build_model(config).parameters())
    assert 0.55 * whole < least_weights(config) <= whole
    if config.d_model == 64:
        assert least_weights(config) > 0.8 * whole


@pytest.mark.parametrize(
    "settings",
    [
        {"vocab_size": 10**12},
        {"n_layer": 10**9},
        {"d_model": 10**7},
        {"d_inner": 10**12},
        {"n_head": 10**12, "d_head": 1},
        {"d_head": 10**12},
        {"d_embed": 10**12},
        {"attn_type": 3, "n_positions": 10**12},
        {"attn_type": 1, "n_positions": 10**12},
        {"kind": "lstm", "n_layer": 10**9},
    ],
    ids=str,
)
def test_a_model_that_fits_nowhere_is_refused_before_it_is_made(settings: dict) -> None:
    began = time.process_time()
    # An LSTM has none of the settings of attention.
    base = ModelConfig(vocab_size=11, d_model=8) if "kind" in settings else TINY
    config = replace(base, **settings)
    name, value = [*settings.items()][-1]
    if name == "d_head" and value == 1:
        name, value = "n_head", 10**12
    message = rf"model\.{name}={value}\b.*: the weights would take at least .*B, and this machine"
    with pytest.raises(ValueError, match=message):
        build_model(config)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("train", {"batch_size": 10**9}),
        ("train", {"segment_len": 10**12}),
        ("train", {"stages": ((0.0, 128, 10**12), (0.5, 128, 512))}),
        ("model", {"mem_len": 10**12}),
        ("model", {"ext_len": 10**12}),
        ("model", {"n_layer": 10**9}),
        ("model", {"sample_softmax": 10**12}),
    ],
    ids=str,
)
def test_a_training_that_fits_nowhere_is_refused_before_its_text_is_read(
    tmp_path: Path, section: str, settings: dict
) -> None:
    # So many steps that the memory would be full in the end.
    config = Config(
        model=ModelConfig(), data=DataConfig(path="no-such-text"), train=TrainConfig(steps=10**11)
    )
    config = replace(config, **{section: replace(getattr(config, section), **settings)})
    ((name, value),) = settings.items()
    named = "" if name == "stages" else rf"{section}\.{name}={value}\b.*: "
    what = "the weights" if name == "n_layer" else "a step"
    with pytest.raises(ValueError, match=rf"{named}{what} would take at least"):
        txl.train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_memory_that_a_training_never_fills_is_no_reason_to_refuse_it() -> None:
    there = total_memory(CPU) or 1 << 40
    # One text has room for it, many do not, and so few steps do not fill it.
    model = replace(TINY, mem_len=there // (4 * 2 * 8) // 2)
    config = Config(model=model, data=DataConfig(path="a"), train=TrainConfig(steps=3))
    require_training(config, CPU, n_streams=32)
    with pytest.raises(ValueError, match=r"train\.batch_size=32.*model\.mem_len=\d+"):
        require_training(replace(config, train=TrainConfig(steps=10**11)), CPU, n_streams=32)


def test_a_memory_longer_than_the_text_is_no_longer_than_the_text(model) -> None:
    ids = torch.randint(0, 11, (200,), generator=torch.Generator().manual_seed(1))
    expected = txl.evaluate(model, ids, txl.WithMemory(segment_len=16, mem_len=200))
    found = txl.evaluate(
        model, ids, txl.WithMemory(segment_len=16, mem_len=10**12, attn_len=10**12)
    )
    assert found.nll == expected.nll
    assert found.mem_len == 10**12
    assert txl.evaluate(model, ids, txl.WithMemory(segment_len=10**12, clamp_len=10**12)).nll > 0


def test_a_text_without_end_needs_room_for_its_whole_memory(model) -> None:
    # As many symbols as the model has.
    vocab = train_vocab("chars", ["abcdefghijk"])
    assert len(vocab) == model.config.vocab_size
    for begin in (
        lambda: txl.generate(model, [1], length=3, mem_len=10**12),
        lambda: txl.generate_batch(model, [[1], [2]], length=3, mem_len=10**12),
        lambda: txl.Session(model, vocab, mem_len=10**12),
    ):
        with pytest.raises(ValueError, match=r"^mem_len=1000000000000, .*: the memory, once full"):
            begin()
    assert len(list(txl.generate(model, [1], length=3, mem_len=10**4))) == 3


def test_a_full_memory_is_counted_and_not_made() -> None:
    zeros = build_model(replace(TINY, start_memory="zeros"))
    assert full_memory(zeros, 10**12) == 2 * 2 * 8 * 4 * 10**12
    lstm = ModelConfig(kind="lstm", vocab_size=11, n_layer=2, d_model=8, mem_len=0)
    assert full_memory(build_model(lstm), 10**12) == 2 * 16 * 4


def test_a_million_cutoffs_are_refused_at_once() -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match="a list of at most 1,000 items") as caught:
        ModelConfig(vocab_size=10**7, cutoffs=tuple(range(1, 10**6)))
    assert len(str(caught.value)) < 300
    assert ModelConfig(vocab_size=10**7, cutoffs=tuple(range(1, 1001))).clusters[-1].start == 1000
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "settings",
    [
        {"n_layer": 10**9}, {"d_model": 10**7}, {"vocab_size": 10**12}, {"d_inner": 10**15},
        {"d_head": 10**15}, {"cutoffs": list(range(1, 10**5))},
    ],
    ids=lambda x: next(iter(x)),
)  # fmt: skip
def test_a_folder_with_absurd_sizes_is_refused_at_once(model, tmp_path: Path, settings) -> None:
    import json

    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    began = time.process_time()
    with pytest.raises((ValueError, RuntimeError), match=r"config\.json|would take at least"):
        txl.TransformerXL.from_pretrained(tmp_path)
    assert time.process_time() - began < 2


def test_what_fits_is_compared_with_what_the_machine_has() -> None:
    there = total_memory(CPU)
    if there is None:
        pytest.skip("this system does not say")
    require_bytes("it", there, CPU, {"x": 1}, "wait")
    with pytest.raises(ValueError, match=rf"^x=1: it would take at least .* has {readable(there)}"):
        require_bytes("it", there + 1, CPU, {"x": 1}, "wait")
    assert readable(999) == "999 B"
    assert readable(16 * 10**9) == "16 GB"
