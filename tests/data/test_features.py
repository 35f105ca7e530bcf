"""Recordings: arrays that are read as they are, in streams that know where they begin."""

import numpy as np
import pytest
import torch

from transformer_xl.config import Config, DataConfig, ModelConfig
from transformer_xl.data import prepare
from transformer_xl.data.recordings import (
    FeatureCorpus,
    Recordings,
    open_corpus,
    write_recordings,
)
from transformer_xl.data.segments import Segments


def made(n=20, *, real=False, seed=0):
    draw = np.random.default_rng(seed)
    inputs = np.arange(n, dtype=np.float32)[:, None] + np.array([0, 0.5], np.float32)
    targets = draw.normal(size=n).astype(np.float32) if real else draw.integers(0, 3, n)
    targets[::4] = np.nan if real else -100
    starts = np.zeros(n, bool)
    starts[[0, 7, 13]] = True
    return Recordings(inputs, targets, starts)


@pytest.fixture(params=[False, True], ids=["classes", "numbers"])
def folder(request, tmp_path):
    for n, split in enumerate(("train", "valid", "test")):
        write_recordings(tmp_path, split, made(real=request.param, seed=n))
    return tmp_path


def test_what_is_written_is_read(folder):
    corpus = open_corpus(DataConfig(vocab="features", path=str(folder)), print)
    assert isinstance(corpus, FeatureCorpus)
    again, original = corpus.split("train"), made(real=corpus.are_real)
    for part in ("inputs", "targets", "starts"):
        np.testing.assert_array_equal(getattr(again, part), getattr(original, part))
    assert (corpus.n_features, corpus.n_tokens("test")) == (2, 20)
    assert corpus.n_classes == (0 if corpus.are_real else 3)
    assert {*corpus.checksums} == {"train", "valid", "test"}


def test_a_stream_reads_one_recording_after_the_other(folder):
    split = FeatureCorpus(folder).split("train")
    segments = Segments(split, batch_size=2, segment_len=6)
    read = [(*segments.next_segment(), segments.starts, segments.completed) for _ in range(4)]
    inputs, targets, starts, counted = (torch.cat(x, 1) for x in zip(*read, strict=True))
    places = (torch.arange(24) + torch.tensor([[0], [10]])) % 20
    np.testing.assert_array_equal(inputs[..., 0], places)
    np.testing.assert_array_equal(targets, np.array(split.targets)[places])
    # Also where the data begin again.
    assert starts.nonzero().tolist() == [
        *([0, n] for n in (0, 7, 13, 20)),
        *([1, n] for n in (3, 10, 17, 23)),
    ]
    assert torch.equal(counted, places % 4 != 0)


def test_a_stream_that_jumps_begins_anew_and_continues_exactly(folder):
    split = FeatureCorpus(folder).split("train")
    one, other = (Segments(split, 2, 3, roll_seed=5) for _ in range(2))
    before, read = None, []
    for _ in range(15):
        inputs, _ = one.next_segment()
        read.append((inputs, one.starts))
        places = inputs[..., 0].long()
        for n in range(3):
            if before is not None:
                jumps = places[:, n] != before + 1
                assert bool((one.starts[:, n] >= jumps).all())
            before = places[:, n]
    for _ in range(4):
        other.next_segment()
    again = Segments(split, 2, 3, roll_seed=5)
    again.load_state_dict(other.state_dict())
    for inputs, starts in read[4:]:
        assert torch.equal(again.next_segment()[0], inputs)
        assert torch.equal(again.starts, starts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": np.zeros((20, 2), np.int64)}, "must be real inputs"),
        ({"inputs": np.zeros((19, 2), np.float32)}, "must be real inputs"),
        ({"inputs": np.zeros((20, 2, 2), np.float32)}, "must be real inputs"),
        ({"targets": np.zeros(20, bool)}, "int64 or real targets"),
        ({"starts": np.zeros(20, np.int64)}, "starts of bool"),
    ],
)
def test_arrays_that_do_not_fit_are_named(change, message):
    arrays = {name: getattr(made(), name) for name in ("inputs", "targets", "starts")}
    with pytest.raises(ValueError, match=message):
        Recordings(**arrays | change)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("inputs", np.nan, "position 9: .* inputs must be finite"),
        # Finite in float64, but not as it is read.
        ("inputs", 1e300, "position 9: .* inputs must be finite"),
        ("targets", -1, "position 9: .* classes are 0, 1, 2"),
        ("targets", np.inf, "position 9: .* targets must be finite"),
    ],
)
def test_values_that_no_model_can_read_are_named(tmp_path, part, value, message):
    one = made(real=isinstance(value, float))
    arrays = {name: np.array(getattr(one, name)) for name in ("inputs", "targets", "starts")}
    if value == 1e300:
        arrays["inputs"] = arrays["inputs"].astype(np.float64)
    arrays[part][9] = value
    with np.errstate(over="ignore"), pytest.raises(ValueError, match=message):
        write_recordings(tmp_path, "train", Recordings(**arrays))
    assert not [*tmp_path.iterdir()]


def test_a_file_that_is_no_array_is_refused(folder):
    np.save(folder / "train_inputs.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"train_inputs\.npy is no array of numbers"):
        Recordings.read(folder, "train")
    np.savez(folder / "several.npz", np.zeros((20, 2)))
    (folder / "several.npz").rename(folder / "train_inputs.npy")
    with pytest.raises(ValueError, match=r"train_inputs\.npy is no array of numbers"):
        Recordings.read(folder, "train")
    (folder / "train_inputs.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"train_inputs\.npy is no array of numbers"):
        Recordings.read(folder, "train")


def test_splits_must_agree(folder):
    other = made(real=not FeatureCorpus(folder).are_real)
    write_recordings(folder, "test", other)
    with pytest.raises(ValueError, match=r"the test split has inputs of width 2 and .* must agree"):
        FeatureCorpus(folder)


def test_without_a_folder_or_with_settings_of_texts_is_refused(folder):
    with pytest.raises(ValueError, match=r"set data\.path to their folder"):
        open_corpus(DataConfig(vocab="features"), print)
    with pytest.raises(ValueError, match="no text is prepared"):
        prepare(DataConfig(vocab="features", path=str(folder)))
    with pytest.raises(ValueError, match="reset_at='a' has no effect with vocab='features'"):
        DataConfig(vocab="features", reset_at="a")
    with pytest.raises(ValueError, match=r"data\.vocab='features' with model\.n_features=0"):
        Config(model=ModelConfig(), data=DataConfig(vocab="features"))
    with pytest.raises(ValueError, match=r"data\.vocab='bytes' with model\.n_features=2"):
        Config(model=ModelConfig(n_features=2), data=DataConfig())
