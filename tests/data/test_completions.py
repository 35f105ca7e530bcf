"""Prompts and completions: loss and evaluation count what follows a separator."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from transformer_xl.config import Config, DataConfig, ModelConfig, TrainConfig
from transformer_xl.config.distributed import World
from transformer_xl.data import Segments, prepare
from transformer_xl.data.completions import in_completion
from transformer_xl.inference.evaluate import (
    SlidingWindow,
    WithMemory,
    evaluate,
    score,
)
from transformer_xl.model import build_model
from transformer_xl.train.beginning import fit_to_corpus, new_state
from transformer_xl.train.runner import Network
from transformer_xl.train.step import train_step

END, SEPARATOR, V = 0, 1, 17
CONFIG = ModelConfig(
    vocab_size=V,
    n_layer=2,
    n_head=2,
    d_model=12,
    d_inner=20,
    mem_len=12,
    dropout=0.0,
    init_std=0.4,
    reset_at=END,
    completion_at=SEPARATOR,
)


def documents(n, seed=0, longest=9):
    """Tokens of n documents, and for each but the first whether it belongs to a completion.

    Some documents go on with further prompts and completions.
    """
    draw = np.random.default_rng(seed)
    tokens, completed = [END], []
    for _ in range(n):
        prompt, completion = (
            draw.integers(2, V, size=draw.integers(low, longest)).tolist() for low in (0, 1)
        )
        end = SEPARATOR if draw.random() < 0.3 else END
        tokens += [*prompt, SEPARATOR, *completion, end]
        completed += [False] * (len(prompt) + 1) + [True] * (len(completion) + 1)
    # The text ends with a document.
    tokens[-1] = END
    return np.array(tokens, dtype=np.uint16), np.array(completed)


def test_completions_are_found_whatever_a_text_is_cut_into():
    tokens, completed = documents(40)
    assert np.array_equal(in_completion(tokens[:-1], CONFIG), completed)
    for cut in range(1, len(tokens) - 1, 3):
        before = in_completion(tokens[:cut], CONFIG)
        after = in_completion(tokens[cut:-1], CONFIG, bool(before[-1]))
        assert np.array_equal(np.concatenate([before, after]), completed)


@pytest.mark.parametrize(
    ("batch_size", "segment_len", "ext_len"), [(1, 5, 0), (3, 7, 0), (4, 6, 3)]
)
def test_segments_say_which_targets_are_completions(batch_size, segment_len, ext_len):
    tokens, completed = documents(60)
    # The text is read as a ring, where its last token, an end, stands before the first one.
    tokens, within = tokens[1:], torch.from_numpy(np.roll(completed, -1))
    segments = Segments(tokens, batch_size, segment_len, ext_len, completions=CONFIG)
    places = Segments(np.arange(len(tokens)), batch_size, segment_len, ext_len)
    for _ in range(2 * len(tokens) // (batch_size * segment_len)):
        segments.next_segment()
        inputs, _ = places.next_segment()
        assert torch.equal(segments.completed, within[inputs[:, ext_len:]])


def test_a_completion_may_be_longer_than_a_stream():
    # Four documents in streams of a quarter of one: most begin within a completion.
    tokens = np.tile(np.r_[END, np.full(20, 5), SEPARATOR, np.full(2800, 7)], 4)
    within = torch.from_numpy(in_completion(tokens, CONFIG))
    first = Segments(tokens, 16, 8, completions=CONFIG)
    places = Segments(np.arange(len(tokens)), 16, 8)
    for _ in range(60):
        state = first.state_dict()
        first.next_segment()
        assert torch.equal(first.completed, within[places.next_segment()[0]])
    resumed = Segments(tokens, 16, 8, completions=CONFIG)
    resumed.load_state_dict(state)
    resumed.next_segment()
    assert torch.equal(resumed.completed, first.completed)


@pytest.mark.parametrize(
    "how",
    [
        WithMemory(segment_len=5),
        WithMemory(segment_len=5, mem_len=60, batch_size=3),
        SlidingWindow(window=6),
    ],
    ids=str,
)
def test_an_evaluation_counts_completions_alone(how):
    torch.manual_seed(3)
    model = build_model(CONFIG).double().eval()
    # A window is computed for each token.
    tokens, completed = documents(6 if isinstance(how, SlidingWindow) else 20)
    found = evaluate(model, tokens, how)
    assert found.tokens == completed.sum()
    everything = build_model(replace(CONFIG, completion_at=None)).double().eval()
    everything.load_state_dict(model.state_dict())
    assert evaluate(everything, tokens, how).tokens == len(completed)
    if isinstance(how, SlidingWindow):
        pieces = [tokens[max(end - 6, 0) : end] for end in range(1, len(tokens))]
        nll = [everything(torch.tensor([x.tolist()])).log_probs[0, -1].tolist() for x in pieces]
        scores = np.array([x[y] for x, y in zip(nll, tokens[1:], strict=True)])
    else:
        lengths = {"segment_len": how.segment_len, "mem_len": how.mem_len}
        scores = np.array([*score(everything, tokens, **lengths)][1:])
    assert found.nll == pytest.approx(-scores[completed].mean(), rel=1e-9)


def test_a_text_without_completions_is_refused():
    model = build_model(CONFIG).eval()
    with pytest.raises(ValueError, match="no completion: the token completion_at=1 is not in it"):
        evaluate(model, [END, 5, 6, END, 7])


@pytest.fixture
def table(tmp_path):
    """Makes recipes for a table with two columns."""
    draw = np.random.default_rng(0)
    rows = ["".join(draw.choice(list("abcd"), size=draw.integers(1, 9))) for _ in range(300)]
    (tmp_path / "table.tsv").write_text("".join(f"{x}\t{x[::-1]}\n" for x in rows))
    data = DataConfig(
        path=str(tmp_path / "table.tsv"),
        vocab="chars",
        reset_at="\n",
        completion_at="\t",
        cache_dir=str(tmp_path),
    )

    def make(**settings):
        train = {"batch_size": 4, "segment_len": 8, "precision": "float32", "lr": 1e-2, **settings}
        model = replace(CONFIG, vocab_size=0, reset_at=None, completion_at=None)
        return Config(model=model, data=data, train=TrainConfig(**train))

    return make


def begun(config):
    corpus = prepare(config.data)
    config = fit_to_corpus(config, corpus)
    return config, new_state(config, corpus, torch.device("cpu"), World())


def losses(config):
    config, state = begun(config)
    network = Network(state.model, config.train, state.world)
    return [float(train_step(config, state, network).loss) for _ in range(3)]


@pytest.mark.usefixtures("one_thread")
def test_prompts_may_have_less_weight(table):
    _, state = begun(table())
    tokens, targets = state.segments.next_segment()
    nll = state.model.eval()(tokens, None, targets).nll.detach()
    weights = torch.where(state.segments.completed, 1.0, 0.25)
    expected = float((nll * weights).sum() / weights.sum())
    assert losses(table(prompt_loss_weight=0.25))[0] == pytest.approx(expected, rel=1e-5)
