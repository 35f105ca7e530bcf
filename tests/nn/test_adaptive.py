"""The adaptive softmax is one distribution, however it is stored and whatever is left out."""

from dataclasses import replace

import pytest
import torch
from tests.nn.conftest import filled
from tests.ops.test_nll import Largest

from transformer_xl.config import ModelConfig
from transformer_xl.model import AdaptiveEmbedding, AdaptiveSoftmax, Embedding
from transformer_xl.ops import nll

V, D = 29, 8
CONFIG = ModelConfig(vocab_size=V, cutoffs=(5, 9, 17), n_head=2, d_model=D, d_inner=12)
VARIANTS = {
    "one table": {},
    "one table of its own": {"tie_embeddings": False},
    "one narrow table": {"d_embed": 6},
    "one narrow table, all projections tied": {"d_embed": 6, "tie_projections": True},
    "one narrow table, some projections tied": {
        "d_embed": 6,
        "tie_projections": (True, False, True, False),
    },
    "narrower tables": {"div_val": 2},
    "narrower tables of its own": {"div_val": 2, "tie_embeddings": False},
    "narrower tables, all projections tied": {"div_val": 2, "tie_projections": True},
    "narrower tables, the projections of the tails tied": {
        "div_val": 2,
        "tie_projections": (False, True, True, True),
    },
    "narrower tables, the widest not projected": {"div_val": 2, "proj_same_dim": False},
    "much narrower tables": {"div_val": 4, "d_embed": 64, "tie_projections": True},
    "much narrower tables of its own": {"div_val": 4, "d_embed": 64, "tie_embeddings": False},
    "a single cluster": {"cutoffs": (), "div_val": 2},
    "two clusters": {"cutoffs": (20,)},
}
MEMBERS = {
    "all clusters": range(V),
    "the head alone": range(5),
    "one word of a tail": [0, 3, 9, 2, 2, 1],
    "one tail alone": [18, 28, 17, 18],
    "one tail left out": [3, 28, 6, 0, 5, 17],
    "one word alone": [12],
    "no word": [],
}


def made(**settings):
    torch.manual_seed(0)
    config = replace(CONFIG, **settings)
    embedding = (AdaptiveEmbedding if config.div_val > 1 else Embedding)(config)
    softmax = AdaptiveSoftmax(config, embedding)
    return filled(embedding, 0.7).double(), filled(softmax, 0.7).double()


def named(module):
    return dict(module.named_parameters())


@pytest.fixture(params=VARIANTS)
def pair(request):
    return made(**VARIANTS[request.param])


@pytest.fixture
def softmax(pair):
    return pair[1]


def order(words):
    """The words, mixed, so that tokens of one cluster do not stand together."""
    words = torch.tensor([*words], dtype=torch.int64)
    return words[torch.randperm(len(words))]


@torch.no_grad()
def test_a_word_of_a_tail_has_the_probability_of_its_cluster_times_its_own(pair):
    embedding, softmax = pair
    (hidden,) = torch.randn(1, D).double()
    one_table = isinstance(embedding, Embedding)
    probs = torch.empty(V).double()
    clusters = softmax.clusters
    for i, (start, stop, *_) in enumerate(clusters):
        weight = softmax.weight[start:stop] if one_table else softmax.weights[i]
        projected = hidden
        if not isinstance(softmax.projs[i], torch.nn.Identity):
            projected = softmax.projs[i].weight.T @ hidden
        logits = weight @ projected + softmax.bias[start:stop]
        if i == 0 and len(clusters) > 1:
            symbols = softmax.cluster_weight @ projected + softmax.cluster_bias
            head = torch.cat([logits, symbols]).softmax(0)
            probs[start:stop], of_cluster = head[:stop], head[stop:]
        else:
            probs[start:stop] = logits.softmax(0) * (of_cluster[i - 1] if i else 1)
    torch.testing.assert_close(softmax.log_probs(hidden).exp(), probs, rtol=1e-12, atol=0)


def test_probabilities_sum_to_one(softmax):
    for batch in ((), (4,), (2, 3), (0,)):
        log_probs = softmax.log_probs(torch.randn(*batch, D).double())
        assert log_probs.shape == (*batch, V)
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(batch).double())


def test_losses_and_gradients_are_those_of_the_distribution_in_the_order_of_tokens(softmax):
    for members, words in MEMBERS.items():
        targets = order(words)
        hidden = torch.randn(len(targets), D, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(len(targets)).double()
        leaves = {"hidden": hidden, **named(softmax)}
        found = softmax.nll(hidden, targets)
        expected = -softmax.log_probs(hidden).gather(-1, targets[:, None])[:, 0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, msg=members)
        # What no token needs has a gradient nevertheless: zeros.
        gradients = torch.autograd.grad(found @ weights, [*leaves.values()])
        truth = torch.autograd.grad(expected @ weights, [*leaves.values()])
        for name, one, other in zip(leaves, gradients, truth, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11, msg=f"{members}: {name}")


def test_what_is_tied_is_the_same_and_what_is_not_is_not(pair):
    embedding, softmax = pair
    tables = {id(x) for name, x in named(embedding).items() if "proj" not in name}
    own = {id(x) for name, x in named(softmax).items() if name.startswith("weight")}
    assert len(tables) == len(own)
    is_tied = tables == own
    assert is_tied or not tables & own
    projs = {id(x) for name, x in named(embedding).items() if "proj" in name}
    for cluster, proj in zip(softmax.clusters, softmax.projs, strict=True):
        assert isinstance(proj, torch.nn.Identity) != cluster.has_proj
        if cluster.has_proj:
            assert (id(proj.weight) in projs) == cluster.ties_proj


@pytest.mark.parametrize("settings", [{}, {"div_val": 2}], ids=str)
def test_training_makes_no_table_of_all_words_for_all_tokens(monkeypatch, settings):
    monkeypatch.setattr(nll, "CHUNK", 0)
    monkeypatch.setattr(nll, "LEAST_ROWS", 4)
    n, n_words = 300, 6000
    _, softmax = made(vocab_size=n_words, cutoffs=(100, 1000), **settings)
    # Most tokens are in the largest cluster.
    targets = torch.randint(n_words, (n,))
    hidden = torch.randn(n, D, dtype=torch.float64, requires_grad=True)
    sizes = []
    for loss in (lambda: -softmax.log_probs(hidden).mean(), lambda: softmax.nll(hidden, targets)):
        with Largest() as largest:
            loss().sum().backward()
        sizes.append(largest.numel)
    # The largest that is needed is the gradient of all embeddings.
    assert sizes[0] == n * n_words
    assert sizes[1] <= D * n_words
