"""Tasks on recordings: speech and time series."""

import io
import json
import tarfile
import wave
from pathlib import Path

import numpy as np
import pytest

from transformer_xl.data.recordings import Recordings
from transformer_xl.model.segment import Lengths
from transformer_xl.tasks import load_task
from transformer_xl.tasks.digits import task as spoken_digits
from transformer_xl.tasks.digits.speech import N_MELS, RATE
from transformer_xl.tasks.run import run_task
from transformer_xl.tasks.series import made as series_data
from transformer_xl.tasks.series import task as time_series
from transformer_xl.tasks.task import Trained


def tone(frequency, seconds=0.5):
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(int(RATE * seconds)) / RATE)


def wav(samples, rate=RATE):
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 2**15).astype("<i2").tobytes())
    return content.getvalue()


def test_only_speakers_that_are_there_are_measured(tmp_path):
    for known, metrics in (
        ("ab", {"training speakers"}),
        ("ac", {"training speakers", "other speakers"}),
        ("cd", {"other speakers"}),
    ):
        for split, speakers in (("train", known), ("test", "ab")):
            names = [f"{digit}_{speaker}_0" for speaker in speakers for digit in range(2)]
            (tmp_path / f"{split}.json").write_text(json.dumps({"names": names}))
        found = spoken_digits._measured(tmp_path, "test", np.array([0, 1, 0, 0])).metrics
        assert {*found} == metrics | {"accuracy"}, known
        assert all(np.isfinite(x) for x in found.values()), known


@pytest.fixture
def archives(tmp_path):
    """Digits as tones of their own frequencies, of two speakers and one more in the test."""
    draw = np.random.default_rng(0)
    for part, speakers, indices in (("train", "ab", (5, 6, 20)), ("test", "abc", (0,))):
        with tarfile.open(tmp_path / f"{part}.tar.gz", "w:gz") as files:
            for digit in range(3):
                for speaker in speakers:
                    for index in indices:
                        x = tone(400 + 900 * digit, draw.uniform(0.2, 0.3))
                        content = wav(x + 0.01 * draw.normal(size=len(x)))
                        about = tarfile.TarInfo(f"{part}/{digit}_{speaker}_{index}.wav")
                        about.size = len(content)
                        files.addfile(about, io.BytesIO(content))
    return tmp_path


SMALL = """
[data]
vocab = "features"
path = "."

[model]
n_features = {}
{}
n_layer = 1
n_head = 2
d_model = 16
d_inner = 16
mem_len = 8
dropout = 0.0

[train]
steps = 2
batch_size = 2
segment_len = 8
precision = "float32"
"""


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_digits_are_prepared_trained_and_measured(archives, tmp_path, monkeypatch):
    monkeypatch.setattr(spoken_digits.SpokenDigits, "copies", 2)
    (tmp_path / "mine.toml").write_text(SMALL.format(4 * N_MELS, ""))
    out = tmp_path / "out"
    results = run_task(load_task("digits"), archives, out, models=[str(tmp_path / "mine.toml")])
    found = results["baselines"]["nearest mean spectrum"]["test"]["seeds"][0]
    assert found == {"accuracy": 100, "training speakers": 100, "other speakers": 100}
    assert len(results["models"]) == 1
    train, valid = (Recordings.read(out / "data", x) for x in ("train", "valid"))
    # Two recordings of each speaker and digit, twice; index 20 is held out.
    assert (train.starts.sum(), valid.starts.sum()) == (24, 6)
    # The features with which the figures were measured.
    sums = [np.abs(x.inputs.astype(float)).sum() for x in (train, valid)]
    assert sums == pytest.approx([26_631.25, 6_370.09], rel=1e-4)
    # Nothing is predicted before half of a recording was heard.
    first, second = np.flatnonzero(valid.starts)[:2]
    assert (valid.targets[first:second] == -100).sum() == (second - first) // 2
    with pytest.raises(FileNotFoundError, match=r"train\.tar\.gz is missing"):
        spoken_digits.read_splits(tmp_path / "out")


def test_series_are_made_from_their_seed_and_features_look_back_only():
    one, other = series_data.made_series(2, 7, 500), series_data.made_series(3, 7, 500)
    np.testing.assert_array_equal(one, other[:2])
    assert (series_data.made_series(2, 8, 500) != one).all()
    changed = one.copy()
    changed[:, 400:] = 100.0
    before, after = (series_data.scaled(x) for x in (one, changed))
    np.testing.assert_array_equal(before.features[:, :400], after.features[:, :400])
    np.testing.assert_array_equal(before.features[0, 300, :3], before.values[0, [300, 277, 133]])
    # What is known ahead within the horizon does not need what follows the origin.
    ahead = slice(400, 399 + series_data.HORIZON)
    np.testing.assert_array_equal(before.features[:, ahead, 1:], after.features[:, ahead, 1:])


def test_targets_are_seasonal_differences_of_the_next_hour():
    one = series_data.made_series(2, 7, 500)
    found, values = series_data.recordings(one), series_data.scaled(one).values
    length = 500 - series_data.WEEK + 1
    assert found.starts.nonzero()[0].tolist() == [0, length]
    targets = found.targets.reshape(2, length)
    assert np.isnan(targets[:, -1]).all()
    t = series_data.WEEK - 1 + 10
    np.testing.assert_allclose(targets[:, 10], values[:, t + 1] - values[:, t - 23], rtol=1e-6)


def test_scores_of_forecasts():
    values = np.tile(np.arange(24.0), (1, 20)) + np.repeat(np.arange(20), 24)
    naive = series_data.seasonal_naive(values, 100)
    # A season later all is larger by 1, as it was before.
    assert series_data.mase(values, 100, naive) == pytest.approx([1.0])
    assert series_data.mase(values, 100, naive + 1) == pytest.approx([0.0])
    draw = np.random.default_rng(0)
    paths, truth = draw.normal(size=(1, 4000, 3)), np.zeros((1, 3))
    # The score of a standard normal distribution at its mean.
    expected = 2 / np.sqrt(2 * np.pi) - 1 / np.sqrt(np.pi)
    assert series_data.crps(paths, truth) == pytest.approx([expected], abs=0.02)


def test_forecasts_are_measured_against_what_followed():
    values = np.sin(np.arange(24 * 60) / 3)[None] + np.arange(24 * 60)[None] / 500
    truths = [truth for _, truth in series_data.origins_of(values)]

    def measured(low, middle, high):
        spread = zip(time_series.QUANTILES, (low, middle, high), strict=True)
        spread = [*spread]
        quantiles = [{q: truth + x for q, x in spread} for truth in truths]
        return time_series._measured(values, quantiles).metrics

    exact, name = measured(-1, 0, 1), "coverage of 80 % intervals, %"
    assert exact == pytest.approx({"MASE": 0, name: 100, "width": 2}, abs=1e-9)
    off, further = measured(1, 2, 3), measured(1, 4, 6)
    assert (off[name], off["width"], further["width"]) == (0, pytest.approx(2), pytest.approx(5))
    assert further["MASE"] == pytest.approx(2 * off["MASE"])
    assert off["MASE"] > 0.1


def test_a_model_that_knows_the_future_has_no_error(monkeypatch):
    monkeypatch.setattr(time_series, "N_SERIES", {"test": 2})
    values = series_data.scaled(series_data.made_series(2, time_series.SEEDS["test"])).values
    known = dict(series_data.origins_of(values))

    def forecast(model, features, horizon, *, paths, lengths, **more):
        assert (lengths.mem_len, lengths.attn_len, lengths.clamp_len) == (8, 5, 4)
        return np.repeat(known[features.shape[1] + series_data.WEEK - 2][:, None], paths, 1)

    monkeypatch.setattr(time_series, "forecast", forecast)
    trained = Trained(None, None, None, Lengths(8, 8, 5, 4, 0))
    metrics = load_task("series").measure(trained, Path(), "test").metrics
    assert metrics.pop("coverage of 80 % intervals, %") == 100
    assert metrics == pytest.approx({"MASE": 0, "width": 0, "CRPS": 0}, abs=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_series_are_made_trained_and_forecast(tmp_path, monkeypatch):
    monkeypatch.setattr(time_series, "N_SERIES", {"train": 3, "valid": 1, "test": 1})
    monkeypatch.setattr(time_series, "PATHS", 5)
    (tmp_path / "mine.toml").write_text(SMALL.format(7, "n_mixtures = 2"))
    given = {"models": [str(tmp_path / "mine.toml")], "splits": ("test",)}
    results = run_task(load_task("series"), None, tmp_path / "out", **given)
    (model,) = results["models"].values()
    metrics = model["test"]["seeds"][0]
    assert {"MASE", "coverage of 80 % intervals, %", "width", "CRPS"} == {*metrics}
    # A model that has learnt nearly nothing is somewhat worse than yesterday, and not absurd.
    assert 0.5 < metrics["MASE"] < 5
    assert 0 < metrics["coverage of 80 % intervals, %"] < 100
    assert 0.01 < metrics["width"] < 10
    assert 0.01 < metrics["CRPS"] < 5
    assert {*model["test"]["above"]} >= {"seasonal naive, day", "seasonal naive, week"}
    with pytest.raises(ValueError, match="makes its data: leave them out"):
        run_task(load_task("series"), tmp_path, tmp_path / "other")
