"""Bytes follow the laws of what is divided, and agree with what autograd keeps."""

from dataclasses import asdict

import pytest
import torch

from transformer_xl.apps.estimate import checkpoint_bytes, count_weights, moments, peak
from transformer_xl.apps.estimate.plan import optimizer_numbers
from transformer_xl.apps.estimate.training_memory import (
    gathered_bytes,
    layer_activations,
    memory_bytes,
    outside_activations,
)
from transformer_xl.config.device import autocast
from transformer_xl.model import Memory, TransformerXL

CPU = torch.device("cpu")
VARIANTS = {
    "the paper": {},
    "dropout": {"dropout": 0.1, "attn_dropout": 0.1, "qkv_dropout": 0.1},
    "dropout, locked": {"dropout": 0.1, "variational_dropout": True},
    "pre-norm": {"norm_first": True, "final_norm": True},
    "other norms": {"norm": "rms", "norm_first": True, "qk_norm": True},
    "GELU": {"activation": "gelu"},
    "squared ReLU": {"activation": "relu_squared", "dropout": 0.1},
    "SwiGLU": {"activation": "swiglu", "dropout": 0.1},
    "residuals of the inputs": {"input_recurrence": True, "embedding_residual": True},
    "gates": {"norm_first": True, "gate": "gru"},
    "long memory": {"mem_len": 256},
    "no memory": {"mem_len": 0},
    "narrow heads": {"d_head": 8},
    "learned distances": {"attn_type": 1, "n_positions": 80},
    "sinusoids": {"attn_type": 2},
    "clusters": {"cutoffs": (200, 600), "div_val": 2},
}


def kept(plan):
    """Count what autograd keeps of one pass forward, each storage once, without the weights."""
    torch.manual_seed(0)
    config = plan.config.model
    model = TransformerXL(config).train()
    shape = (plan.B, plan.M, config.d_model)
    memory = Memory([torch.randn(shape) for _ in model.layers])
    known = {x.untyped_storage().data_ptr() for x in [*model.parameters(), *memory.states]}
    found = {}

    def pack(x):
        storage = x.untyped_storage()
        # Held, so that no other takes its place.
        found[storage.data_ptr()] = storage
        return x

    tokens = torch.randint(config.vocab_size, (plan.B, plan.T))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), autocast(plan.precision, CPU):
        model(tokens, memory, tokens)
    return sum(x.nbytes() for place, x in found.items() if place not in known)


@pytest.mark.slow
def test_what_autograd_keeps_is_counted(plan):
    for precision in ("float32", "bfloat16"):
        for name, changed in VARIANTS.items():
            made = plan(changed, precision=precision, device="cpu")
            counted = made.config.model.n_layer * layer_activations(made)
            # Counted are the model's output and the gradient of the softmax, too.
            counted += outside_activations(made)
            assert kept(made) == pytest.approx(counted, rel=0.11), (name, precision)


def test_more_layers_keep_what_a_layer_keeps(plan):
    deep, flat = (plan({"n_layer": n}, precision="float32", device="cpu") for n in (6, 2))
    assert kept(deep) - kept(flat) == pytest.approx(4 * layer_activations(deep), rel=0.02)


def test_twice_the_gpus_remember_half_each(plan):
    for parallel in ("ddp", "fsdp"):
        two, four = (plan(ranks=n, parallel=parallel) for n in (2, 4))
        assert memory_bytes(two) == 2 * memory_bytes(four), parallel


def test_what_is_remembered_is_layers_by_streams_by_positions_by_width(plan):
    assert memory_bytes(plan()) == 2 * 4 * 3 * 8 * 32 * 64
    assert memory_bytes(plan({"mem_len": 96})) == 3 * memory_bytes(plan())


def test_ddp_holds_all_and_fsdp_its_share(plan):
    n = count_weights(plan().config.model).total
    for ranks in (2, 4, 8):
        ddp, fsdp = (
            moments(plan(ranks=ranks, parallel=parallel, train={"average": "ema"}))["update"]
            for parallel in ("ddp", "fsdp")
        )
        for held, share in ((ddp, 1), (fsdp, ranks)):
            assert held.weights == held.gradients == held.average == 4 * n // share
            assert held.optimizer == 8 * n // share


def test_one_process_is_the_same_either_way(plan):
    assert moments(plan(parallel="fsdp")) == moments(plan())


def test_gathered_units_do_not_shrink_with_more_gpus(plan):
    two, eight = (plan(ranks=n, parallel="fsdp") for n in (2, 8))
    assert gathered_bytes(two) == gathered_bytes(eight) > 0
    assert gathered_bytes(plan(ranks=8, precision="float32")) == 0


def test_parts_and_recomputing_save_activations(plan):
    whole = moments(plan())["loss"].activations
    parts = moments(plan(train={"accumulate": 4}))["loss"].activations
    again = moments(plan(train={"recompute": True}))["loss"].activations
    assert whole / 4 < parts < whole / 3
    assert again < whole / 3


def test_more_of_anything_takes_no_less(plan):
    for more in (
        {"model": {"n_layer": 4}},
        {"model": {"d_inner": 512}},
        {"model": {"mem_len": 64}},
        {"model": {"vocab_size": 2000}},
        {"model": {"dropout": 0.1}},
        {"train": {"batch_size": 16}},
        {"train": {"segment_len": 96}},
        {"train": {"average": "ema"}},
    ):
        before, after = moments(plan()), moments(plan(**more))
        assert all(after[name].total >= before[name].total for name in before), more
        assert peak(plan(**more))[1].total > peak(plan())[1].total, more


def test_half_the_digits_keep_less_and_weights_stay_what_they_are(plan):
    for device in ("cpu", "cuda"):
        whole, half = (
            moments(plan(precision=precision, device=device))["backward"]
            for precision in ("float32", "bfloat16")
        )
        assert whole.activations / 2 < half.activations < whole.activations, device
        assert (half.weights, half.optimizer) == (whole.weights, whole.optimizer), device
        assert (half.gathered > 0) == (device == "cuda"), device


def test_the_peak_is_the_largest_moment_and_a_moment_the_sum_of_its_parts(plan):
    found = moments(plan(train={"optimizer": "muon"}))
    name, most = peak(plan(train={"optimizer": "muon"}))
    assert most == found[name]
    assert most.total == max(x.total for x in found.values())
    for moment in found.values():
        assert moment.total == sum(asdict(moment).values())
        assert all(x >= 0 for x in asdict(moment).values())


def test_a_checkpoint_holds_weights_states_and_all_memory_whoever_wrote_it(plan):
    made = plan(train={"average": "ema"}, ranks=4)
    n = count_weights(made.config.model).total
    assert checkpoint_bytes(made) == 4 * (2 * n + optimizer_numbers(made.config) + 8 * 3 * 32 * 64)
    assert checkpoint_bytes(made) == checkpoint_bytes(
        plan(train={"average": "ema"}, ranks=2, parallel="fsdp")
    )
