"""Training on recordings: the trainer, its checkpoints and its evaluation as for texts."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from transformer_xl.cli import main
from transformer_xl.config import Config, DataConfig, EvalConfig, ModelConfig, TrainConfig
from transformer_xl.data.recordings import Recordings, write_recordings
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
    (folder / "recipe.toml").write_text(config.to_toml())
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


@pytest.mark.parametrize("config", ["numbers"], indirect=True)
def test_a_recipe_must_fit_the_recordings(config, tmp_path):
    for settings, message in (
        ({"n_features": 3}, "recordings of width 2 .* do not fit a model with n_features=3"),
        ({"n_mixtures": 0}, "with numbers as targets do not fit .* n_mixtures=0"),
    ):
        wrong = replace(config, model=replace(config.model, **settings))
        with pytest.raises(ValueError, match=message):
            train(wrong, tmp_path / "run", quiet=True)
