"""Training: a run that is stopped and started again ends as one that never was."""

import math
import signal

import pytest
import torch
from safetensors.torch import load_file

from transformer_xl.config.device import pick_device
from transformer_xl.data import prepare
from transformer_xl.model import TransformerXL
from transformer_xl.train import Interrupted, train
from transformer_xl.train.checkpoint.checkpoints import read_about, read_whole

pytestmark = pytest.mark.usefixtures("one_thread")


LSTM = {"kind": "lstm", "n_head": 8, "d_inner": 2048, "mem_len": 0, "attn_dropout": 0.0}


def last_state(folder):
    """All that the newest checkpoint holds, but for how long the steps took."""
    path = max((folder / "checkpoints").iterdir())
    about = read_about(path)
    assert about.pop("seconds") > 0
    about.pop("stage_seconds")
    return about, read_whole(path, "")


# Settings of different parts share a recipe. The first is stopped between saves, with a saved step,
# in the middle of a line of the log and with an evaluation, the others at one of these.
PENALTIES = {"activation_reg": 2.0, "temporal_activation_reg": 1.0}
MINUTES = {"schedule": "constant_cooldown", "minutes": 60.0, "accumulate": 1}
STAGED = {"stages": ((0.0, 3, 5), (0.25, 6, 12), (0.6, 8, 8)), "roll": True}
TAIL = {"average": "tail", "average_start": 0.5, "random_segment_len": True}
SGD = {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1}
RESUMED = {
    "adamw": ((1, 6, 7, 8), {}),
    "bfloat16, lamb, AR, TAR": (
        (7,),
        {"precision": "bfloat16", "optimizer": "lamb", "embedding_lr": 2.0, **PENALTIES},
    ),
    "minutes, ema": ((8,), {**MINUTES, "average": "ema", "average_decay": 0.9}),
    "ext_len, random lengths, half": (
        (5,),
        {"random_segment_len": True, "loss": "half"},
        {"ext_len": 3},
    ),
    "stages, sgd, float16": ((1, 7), {**STAGED, **SGD, "precision": "float16"}),
    "tail, muon, gates": ((6,), {**TAIL, "optimizer": "muon"}, {"gate": "gru", "norm_first": True}),
    "lstm": ((8,), {"optimizer": "muon"}, LSTM),
}


QUICK = ("adamw", "stages, sgd, float16", "lstm")


@pytest.mark.usefixtures("unfinished")
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(each, id=name, marks=[pytest.mark.slow] * (name not in QUICK))
        for name, each in RESUMED.items()
    ],
)
def test_resuming_changes_nothing(tmp_path, toy_recipe, interrupted_at, measured, sections):
    steps, settings, *model = sections
    config = toy_recipe(model=dict(*model), train={"steps": 9, **settings})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config, whole, quiet=True)
    for step in steps:
        interrupted_at(step)
        with pytest.raises(Interrupted, match=f"step {step} and saved"):
            train(config, parts, quiet=True)
    train(config, parts, quiet=True)

    (about, tensors), (others, others_tensors) = map(last_state, (whole, parts))
    assert about == others
    torch.testing.assert_close(tensors, others_tensors, rtol=0, atol=0)
    assert measured(whole) == measured(parts)
    for name in ("best", "last"):
        weights = f"model/{name}/model.safetensors"
        assert (whole / weights).read_bytes() == (parts / weights).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_the_last_step_stops_before_the_evaluation(
    tmp_path, toy_recipe, at_step, number
):
    config = toy_recipe(train={"steps": 3})
    at_step(3, lambda state: signal.raise_signal(number))
    with pytest.raises(Interrupted, match="step 3") as stopped:
        train(config, tmp_path, quiet=True)
    assert stopped.value.signal_number == number
    assert not (tmp_path / "results.json").exists()
    assert train(config, tmp_path, quiet=True)["test"]["tokens"] > 0


@pytest.mark.usefixtures("unfinished")
def test_a_second_signal_stops_at_once_and_handlers_are_put_back(tmp_path, toy_recipe, at_step):
    def twice(state):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    at_step(4, twice)
    with pytest.raises(KeyboardInterrupt):
        train(toy_recipe(), tmp_path, quiet=True)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000003"]


@pytest.mark.usefixtures("unfinished")
def test_a_line_of_the_log_is_the_mean_since_the_line_before(tmp_path, toy_recipe, measured):
    for log_every in (1, 5):
        settings = {"log_every": log_every, "eval_every": 0, "save_every": 0, "steps": 11}
        config = toy_recipe(train=settings)
        train(config, tmp_path / str(log_every), quiet=True)
    each, mean = (
        [r["bits_per_token"] for r in measured(tmp_path / name, "train")] for name in "15"
    )
    assert mean == pytest.approx([sum(each[:5]) / 5, sum(each[5:10]) / 5, each[10]])


@pytest.mark.usefixtures("unfinished")
@pytest.mark.parametrize("step", [4, 6], ids=["evaluated", "saved"])
def test_weights_that_are_no_numbers_are_never_kept(tmp_path, toy_recipe, at_step, step):
    def spoil(state):
        with torch.no_grad():
            state.model.layers[0].attention.o_proj.weight[0, 0] = math.inf

    at_step(step, spoil)
    with pytest.raises(RuntimeError, match=f"weights are not finite after step {step}"):
        train(toy_recipe(), tmp_path, quiet=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000003"]
    kept = [*tmp_path.rglob("model.safetensors")]
    assert all(x.isfinite().all() for path in kept for x in load_file(path).values())


@pytest.mark.usefixtures("unfinished")
def test_the_best_model_is_that_of_the_lowest_validation_loss(tmp_path, toy_recipe, validated):
    weights = validated(3.0, 1.0, 2.0)
    train(toy_recipe(), tmp_path, quiet=True)
    best = TransformerXL.from_pretrained(tmp_path / "model" / "best")
    assert torch.equal(best.content_bias, weights[1])
    last = TransformerXL.from_pretrained(tmp_path / "model" / "last")
    assert torch.equal(last.content_bias, weights[2])
    assert not torch.equal(weights[1], weights[2])


def test_what_cannot_work_is_said_before_anything_is_written(tmp_path, toy_recipe):
    for sections, message in (
        ({"train": {"batch_size": 4000}}, "batch_size=4000 x segment_len=8 needs 32,000"),
        ({"model": {"vocab_size": 99}}, "vocab_size=99 is not the size .* leave it out"),
        ({"data": {"reset_at": "<eos>"}}, "data.reset_at: '<eos>' is not a symbol"),
        ({"data": {"reset_at": "\n"}, "model": {"reset_at": 3}}, "reset_at=3 is not the number"),
        ({"data": {"valid_fraction": 0.0}}, "no valid split"),
        ({"data": {"valid_fraction": 0.0002}}, "validation text has one token"),
        ({"generate": {"prompt": "Ω"}}, r"generate\.prompt='Ω': not in the vocabulary"),
        ({"generate": {"prompt": ""}}, r"generate\.prompt='': the sample at the end needs a token"),
        # The file is not there, so nothing has looked for it.
        ({"data": {"path": "tex\udce9.txt"}}, r"tex\\udce9.*must be UTF-8"),
        ({"generate": {"stop": ("\udce9",)}}, r"\\udce9.*must be UTF-8"),
    ):
        with pytest.raises(ValueError, match=message):
            train(toy_recipe(**sections), tmp_path / "run", quiet=True)
        assert not (tmp_path / "run").exists(), sections


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_text_without_a_completion_is_refused_before_anything_is_written(
    tmp_path, toy_recipe, split
):
    # All characters of the held-out text must be in the vocabulary.
    data = {"reset_at": "\n", "completion_at": "\t", "vocab_from": "all"}
    for name in ("train", "valid", "test"):
        path = tmp_path / f"{name}.txt"
        path.write_text(("a dog\tno\n" if name != split else "the cat saw a dog\n") * 60)
        data["path" if name == "train" else f"{name}_path"] = str(path)
    with pytest.raises(ValueError, match=f"{split}: the text has no completion: the token "):
        train(toy_recipe(data=data), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("unfinished")
def test_a_prepared_corpus_may_move_but_not_become_another(
    tmp_path, toy_recipe, toy_text, interrupted_at
):
    def made_of(text, name):
        path = tmp_path / f"{name}.txt"
        path.write_text(text)
        return prepare(toy_recipe(data={"path": str(path), "cache_dir": str(tmp_path)}).data).folder

    def part(corpus, verify):
        data = {"path": None, "corpus": str(corpus), "verify": verify}
        return train(toy_recipe(data=data), tmp_path / "run", quiet=True)

    text = toy_text.read_text()
    corpus = made_of(text, "one")
    interrupted_at(4)
    with pytest.raises(Interrupted):
        part(corpus, "once")
    # As long as before and with the same characters.
    with pytest.raises(ValueError, match="the text is not the one that the run began with"):
        part(made_of(text[::-1], "other"), "once")
    part(corpus.rename(tmp_path / "moved"), "always")


@pytest.mark.usefixtures("unfinished")
def test_quiet_prints_nothing_and_otherwise_results_stay_off_stdout(tmp_path, toy_recipe, capfd):
    config = toy_recipe(train={"steps": 2})
    train(config, tmp_path / "quiet", quiet=True)
    assert capfd.readouterr() == ("", "")
    train(config, tmp_path / "loud")
    out, err = capfd.readouterr()
    assert out == ""
    assert "step 2: validation" in err
    assert f"parameters on {pick_device().type}" in err


def test_a_memory_that_cannot_fit_once_full_is_refused_before_training(toy_recipe, begun):
    with pytest.raises(ValueError, match=r"mem_len=1000000000000.* once full, would take"):
        begun(toy_recipe(model={"mem_len": 10**12}))
