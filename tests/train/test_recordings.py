"""Training on recordings: the trainer, its checkpoints and its evaluation as for texts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from transformer_xl.cli import main
from transformer_xl.config import Config, DataConfig, EvalConfig, ModelConfig, TrainConfig
from transformer_xl.config.recipes import dump_recipe
from transformer_xl.data.features import FeatureCorpus
from transformer_xl.data.recordings import Recordings, write_recordings
from transformer_xl.inference.evaluate import WithMemory, evaluate
from transformer_xl.model import load_model
from transformer_xl.tasks.series.forecast import forecast
from transformer_xl.train import Interrupted, train
from transformer_xl.train.checkpoint.checkpoints import read_whole

pytestmark = pytest.mark.usefixtures("one_thread")
ENDS = {"classes": {}, "numbers": {"n_mixtures": 2}}


@pytest.fixture(params=ENDS, scope="module")
def config(request, tmp_path_factory):
    """A recipe on noise: the sign of the input is the class, or its double is the number."""
    folder = tmp_path_factory.mktemp("recordings")
    draw = np.random.default_rng(0)
    for split, n in (("train", 300), ("valid", 90), ("test", 60)):
        inputs = draw.normal(size=(n, 2)).astype(np.float32)
        targets = (inputs[:, 0] > 0).astype(np.int64)
        if request.param == "numbers":
            targets = 2 * inputs[:, 0]
        targets[draw.random(n) < 0.3] = np.nan if request.param == "numbers" else -100
        write_recordings(folder, split, Recordings(inputs, targets, np.arange(n) % 9 == 0))
    return Config(
        model=ModelConfig(
            n_features=2,
            n_layer=2,
            n_head=2,
            d_model=8,
            d_inner=8,
            mem_len=4,
            **ENDS[request.param],
            dropout=0.1,
        ),
        data=DataConfig(vocab="features", path=str(folder)),
        train=TrainConfig(
            steps=12,
            batch_size=4,
            segment_len=5,
            accumulate=2,
            roll=True,
            optimizer="muon",
            lr=1e-2,
            precision="float32",
            average="ema",
            eval_every=4,
            save_every=5,
            log_every=2,
            reset_memory=0.2,
        ),
        eval=EvalConfig(batch_size=3, mem_lens=(0, 4)),
    )


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """A run of the recipe, trained by the command."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipe.toml").write_text(dump_recipe(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        assert main(["train", "recipe.toml", "--out", "run", "--quiet"]) == 0
        torch.set_num_threads(threads)
    return folder / "run"


@pytest.fixture
def copied(config, tmp_path):
    """The recipe on a copy of the recordings, which may be changed."""
    data = shutil.copytree(config.data.path, tmp_path / "data")
    return replace(config, data=replace(config.data, path=str(data)))


def state_of(folder):
    return read_whole(max((folder / "checkpoints").iterdir()), "")


@pytest.mark.slow
def test_resuming_changes_nothing(config, run, tmp_path, interrupted_at, measured):
    for step in (3, 7):
        interrupted_at(step)
        with pytest.raises(Interrupted):
            train(config, tmp_path / "parts", quiet=True)
    results = train(config, tmp_path / "parts", quiet=True)
    one, other = state_of(run), state_of(tmp_path / "parts")
    assert one.keys() == other.keys()
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    assert measured(run) == measured(tmp_path / "parts")
    assert [row["mem_len"] for row in results["memory_curve"]] == [0, 4]
    assert (tmp_path / "parts" / "report.html").is_file()
    # What was finished is found again.
    assert train(config, tmp_path / "parts", quiet=True) == results


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_split_without_a_target_is_refused_before_anything_is_written(copied, tmp_path, split):
    path = tmp_path / "data" / f"{split}_targets.npy"
    targets = np.load(path)
    np.save(path, np.full_like(targets, np.nan if targets.dtype.kind == "f" else -100))
    with pytest.raises(ValueError, match=f"{split}: the recordings have no target: all are"):
        train(copied, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_steps_that_reach_no_target_are_refused_before_anything_is_written(copied, tmp_path):
    path = tmp_path / "data" / "test_targets.npy"
    targets = np.load(path)
    targets[:15] = np.nan if targets.dtype.kind == "f" else -100
    np.save(path, targets)
    config = replace(copied, eval=EvalConfig(max_steps=3), train=replace(copied.train, steps=1))
    with pytest.raises(ValueError, match=r"test: max_steps=3 reads no target: give a larger"):
        train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    train(replace(config, eval=EvalConfig(max_steps=4)), tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / "report.html").is_file()


def test_each_target_counts_once_however_the_recordings_are_divided(config, run):
    model = load_model(run).double()
    recordings = FeatureCorpus(Path(config.data.path)).split("test")
    whole = evaluate(model, recordings, WithMemory(segment_len=60, mem_len=60))
    assert whole.tokens == recordings.counted().sum() < len(recordings)
    # No recording is longer than the memory, so that neither parts nor segments show.
    for batch_size, segment_len, mem_len in ((1, 7, 9), (4, 11, 9), (7, 3, 9), (5, 8, 40)):
        result = evaluate(
            model,
            recordings,
            WithMemory(segment_len=segment_len, mem_len=mem_len, batch_size=batch_size),
        )
        assert result.tokens == whole.tokens
        assert result.nll == pytest.approx(whole.nll, abs=1e-9)


@pytest.mark.slow
def test_the_commands_evaluate_a_run_and_refuse_what_needs_text(run, tmp_path, capsys):
    run, recipe = str(run), str(run.parent / "recipe.toml")
    assert main(["eval", run, "--eval.split", "test", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["split"] == "test"
    assert np.isfinite(found["nll"])
    text = tmp_path / "text.txt"
    text.write_text("some text")
    for command in (
        ["generate", run, "--prompt", "a"],
        ["score", run, str(text)],
        ["compress", str(text), "--model", run],
        ["export", run, str(tmp_path / "exported")],
    ):
        assert main(command) == 2, command
        assert "reads real vectors (n_features=2)" in capsys.readouterr().err, command
    assert main(["eval", run, "--file", str(text)]) == 2
    assert "--file is for text" in capsys.readouterr().err
    assert main(["prepare", recipe]) == 2
    assert "no text is prepared" in capsys.readouterr().err


def test_fine_tuning_begins_with_the_weights(config, run, tmp_path, capsys):
    out = str(tmp_path / "tuned")
    settings = ["--data.path", config.data.path, "--train.steps", "1", "--train.lr", "1e-9"]
    settings += ["--train.muon_lr", "1e-9", "--quiet"]
    assert main(["train", str(run), "--out", out, *settings]) == 0, capsys.readouterr()
    before, after = (load_model(x) for x in (run, out))
    for x, y in zip(before.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("config", ["numbers"], indirect=True)
def test_a_recipe_must_fit_the_recordings(config, tmp_path):
    for settings, message in (
        ({"n_features": 3}, "recordings of width 2 .* do not fit a model with n_features=3"),
        ({"n_mixtures": 0}, "with numbers as targets do not fit .* n_mixtures=0"),
    ):
        wrong = replace(config, model=replace(config.model, **settings))
        with pytest.raises(ValueError, match=message):
            train(wrong, tmp_path / "run", quiet=True)


@pytest.mark.parametrize("config", ["classes"], indirect=True)
def test_a_forecast_needs_a_mixture(run):
    with pytest.raises(ValueError, match="a forecast needs a model that predicts real values"):
        forecast(load_model(run), np.zeros((1, 3, 2)), 4)
