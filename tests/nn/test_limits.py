"""What cannot fit into any machine is refused at once, with the bytes that it would take."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import transformer_xl as txl
from transformer_xl.config import Config, DataConfig, ModelConfig, TrainConfig
from transformer_xl.config.device import total_memory
from transformer_xl.data import train_vocab
from transformer_xl.model import build_model, limits, load_model, pretrained
from transformer_xl.train.beginning import require_memory

CPU = torch.device("cpu")
TINY = ModelConfig(vocab_size=11, n_layer=2, n_head=2, d_model=8, d_inner=12, mem_len=4)
KINDS = [
    TINY,
    replace(TINY, n_layer=1, n_features=3, n_mixtures=2, vocab_size=0),
    replace(TINY, d_model=64, d_head=48, d_embed=16, vocab_size=500, tie_embeddings=False),
    replace(TINY, n_layer=4, d_model=64, cutoffs=(20, 60), div_val=2, vocab_size=500),
    replace(TINY, attn_type=1, n_positions=200, layer_attn_lens=(3, 4)),
    replace(TINY, norm_first=True, gate="gru", norm="rms", embedding_residual=True),
    ModelConfig(kind="lstm", n_layer=2, d_model=64, vocab_size=500, mem_len=0),
    ModelConfig(kind="gpt", n_layer=5, n_head=2, d_model=8, d_inner=12, vocab_size=11),
]


def change(folder: Path, **settings: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize("config", KINDS, ids=range(len(KINDS)))
def test_the_weights_are_counted_without_building_all_layers(config: ModelConfig) -> None:
    whole = sum(x.numel() for x in build_model(config).parameters())
    assert limits.least_weights(config) == whole


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("train", {"batch_size": 10**9}),
        ("train", {"stages": ((0.0, 128, 10**12), (0.5, 128, 512))}),
        ("model", {"mem_len": 10**12}),
        ("model", {"n_layer": 10**9}),
        ("model", {"vocab_size": 10**12}),
        ("model", {"cutoffs": (10**12,)}),
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
    named = "" if name in ("stages", "cutoffs") else rf"{section}\.{name}={value}\b.*: "
    with pytest.raises(ValueError, match=rf"{named}a step would take at least"):
        txl.train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_training_of_earlier_versions_with_a_sampled_softmax_is_refused() -> None:
    config = Config(model=replace(TINY, sample_softmax=5), data=DataConfig(path="a"))
    with pytest.raises(ValueError, match=r"sample_softmax=5: there is no sampled softmax any more"):
        require_memory(config, CPU, n_streams=1)


def test_a_memory_that_a_training_never_fills_is_no_reason_to_refuse_it() -> None:
    there = total_memory(CPU) or 1 << 40
    # One text has room for it, many do not, and so few steps do not fill it.
    model = replace(TINY, mem_len=there // (4 * 2 * 8) // 2)
    config = Config(model=model, data=DataConfig(path="a"), train=TrainConfig(steps=3))
    require_memory(config, CPU, n_streams=32)
    config = replace(config, train=TrainConfig(steps=10**11))
    with pytest.raises(ValueError, match=r"train\.batch_size=32.*model\.mem_len=\d+"):
        require_memory(config, CPU, n_streams=32)


def test_a_text_without_end_needs_room_for_its_whole_memory() -> None:
    model = build_model(TINY).eval()
    # As many symbols as the model has.
    vocab = train_vocab("chars", ["abcdefghijk"])
    for begin in (
        lambda: txl.generate(model, [1], length=3, mem_len=10**12),
        lambda: txl.generate_batch(model, [[1], [2]], length=3, mem_len=10**12),
        lambda: txl.Session(model, vocab, mem_len=10**12),
    ):
        with pytest.raises(ValueError, match=r"^mem_len=1000000000000, .*: the memory, once full"):
            begin()
    assert len(list(txl.generate(model, [1], length=3, mem_len=10**4))) == 3
    # The text of an evaluation ends, and its memory is no longer.
    strategy = txl.WithMemory(segment_len=10**12, mem_len=10**12, attn_len=10**12)
    assert txl.evaluate(model, [1, 2, 3], strategy).nll > 0


def test_a_full_memory_is_counted_and_not_made() -> None:
    zeros = build_model(replace(TINY, start_memory="zeros"))
    assert zeros.memory_bytes(10**12) == 2 * 2 * 8 * 4 * 10**12
    lstm = ModelConfig(kind="lstm", vocab_size=11, n_layer=2, d_model=8, mem_len=0)
    assert build_model(lstm).memory_bytes(10**12) == 2 * 16 * 4


@pytest.mark.parametrize(
    "settings",
    [
        {"n_layer": 10**9}, {"d_model": 10**7}, {"vocab_size": 10**12}, {"d_head": 10**15},
        {"d_inner": 1 << 40}, {"cutoffs": list(range(1, 10**5))},
    ],
    ids=lambda x: next(iter(x)),
)  # fmt: skip
def test_a_folder_with_absurd_sizes_is_refused_at_once(folder: Path, settings) -> None:
    change(folder, **settings)
    began = time.process_time()
    with pytest.raises((ValueError, RuntimeError), match=r"config\.json|would take at least"):
        load_model(folder)
    assert time.process_time() - began < 2


def test_what_fits_is_compared_with_what_the_machine_has() -> None:
    there = total_memory(CPU)
    if there is None:
        pytest.skip("this system does not say")
    limits.require_bytes("it", there, CPU, {"x": 1}, "wait")
    message = rf"^x=1: it would take at least .* has {limits.readable(there)}"
    with pytest.raises(ValueError, match=message):
        limits.require_bytes("it", there + 1, CPU, {"x": 1}, "wait")
    assert limits.readable(999) == "999 B"
    assert limits.readable(16 * 10**9) == "16 GB"


def test_a_model_is_not_built_beyond_the_limit_which_a_flag_lifts(
    folder: Path, tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_bytes = 4 * limits.least_weights(tiny_config) + 50 * limits._TENSOR_BYTES
    monkeypatch.setattr(limits, "total_memory", lambda device: n_bytes)
    load_model(folder)
    monkeypatch.setattr(limits, "total_memory", lambda device: n_bytes // 10)
    with limits.any_size():
        load_model(folder)
    assert limits._ANY_SIZE not in os.environ
    monkeypatch.setattr(pretrained, "build_model", None)
    with pytest.raises(limits.MemoryLimitError, match=r"to load .*: --any_size loads it all the"):
        load_model(folder)
    monkeypatch.setenv(limits._ANY_SIZE, "yes")
    with limits.any_size():
        pass
    assert os.environ[limits._ANY_SIZE] == "yes"


@pytest.mark.slow
def test_the_limit_is_lifted_in_child_processes_too(folder: Path) -> None:
    program = f"from transformer_xl.model import load_model; load_model({str(folder)!r})"
    program = f"from transformer_xl.model import limits; limits._TENSOR_BYTES = 1 << 60\n{program}"
    command = [sys.executable, "-c", program]
    assert b"--any_size" in subprocess.run(command, capture_output=True).stderr
    with limits.any_size():
        subprocess.run(command, check=True)
