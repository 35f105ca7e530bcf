"""Bytes sent, operations and seconds: what grows with what, and where it ends."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from transformer_xl.apps.bench.speed import forward_flops, training_flops
from transformer_xl.apps.estimate import HARDWARE, Assumed, count_weights, sent_bytes, times
from transformer_xl.apps.estimate.plan import layer_matrices, muon_weights
from transformer_xl.apps.estimate.scaling import (
    MUON_ITERATIONS,
    bound_by_sending_from,
    fits,
    largest_batch,
    link_rate,
    most_gpus,
    muon_flops,
    step_flops,
    update_bytes,
)
from transformer_xl.train.optimizers import Muon, orthogonalize

H100, ASSUMED = HARDWARE["h100"], Assumed()


def total(plan):
    return sum(sent_bytes(plan).values())


def test_ddp_sends_all_gradients_around_a_ring_and_back(plan):
    for ranks in (2, 4, 8):
        made = plan(ranks=ranks)
        n = count_weights(made.config.model).total
        assert total(made) == 2 * (4 * n * (ranks - 1) // ranks), ranks


def test_what_is_sent_does_not_depend_on_the_text_read(plan):
    for more in ({"train": {"batch_size": 32}}, {"train": {"segment_len": 96}}):
        for parallel in ("ddp", "fsdp"):
            assert total(plan(ranks=4, parallel=parallel)) == total(
                plan(ranks=4, parallel=parallel, **more)
            )


def test_one_process_sends_nothing(plan):
    assert total(plan()) == total(plan(parallel="fsdp")) == 0


def test_fsdp_gathers_layers_twice_for_each_part_and_the_root_once(plan):
    weights = count_weights(plan().config.model)
    positions = 3 * 64 * 64
    layers = 3 * weights.layer - positions
    for parts in (1, 2):
        made = plan(ranks=2, parallel="fsdp", train={"accumulate": parts})
        found = sent_bytes(made)
        assert found["weights"] == parts * 2 * (weights.root + positions + 2 * layers) // 2
        assert found["gradients"] == 4 * weights.total // 2
        assert found["matrices of Muon"] == 0


def test_fsdp_gathers_the_matrices_of_muon_in_float32(plan):
    made = plan(ranks=2, parallel="fsdp", train={"optimizer": "muon"})
    assert sent_bytes(made)["matrices of Muon"] == 4 * muon_weights(made.config) // 2
    assert total(replace(made, parallel="ddp")) == total(plan(ranks=2))


def test_operations_are_those_that_bench_counts(plan):
    made = plan(ranks=2, train={"accumulate": 2, "loss": "half"})
    found = step_flops(made)
    assert found["model"] == training_flops(made.config.model, 4, 48, 32, 24, 2)
    assert found["Muon"] == found["computed again"] == 0


def test_recomputing_costs_the_layers_once_more(plan):
    made = plan(train={"recompute": True})
    model = made.config.model
    whole = forward_flops(model, 8, 48, 32, 48, is_kept=False)
    softmax = 2 * 8 * 48 * 64 * 1000
    assert step_flops(made)["computed again"] == whole - softmax


def test_muons_operations_are_those_of_its_products(plan):
    made = plan({"d_inner": 96}, {"optimizer": "muon"})
    counted = 0
    for rows, columns in layer_matrices(made.config.model):
        with FlopCounterMode(display=False) as counter:
            orthogonalize(torch.randn(1, rows, columns), MUON_ITERATIONS)
        counted += counter.get_total_flops()
    assert muon_flops(made) == 3 * counted
    assert Muon([torch.nn.Parameter(torch.zeros(2, 2))])._iterations == MUON_ITERATIONS


def test_muon_does_the_same_on_every_process_however_many(plan):
    settings = {"optimizer": "muon"}
    assert muon_flops(plan(train=settings)) == muon_flops(plan(train=settings, ranks=8)) > 0


def test_an_update_reads_and_writes_each_number_that_is_held(plan):
    n = count_weights(plan().config.model).total
    # Weights, mean and mean square read and written, gradients read.
    assert update_bytes(plan()) == 4 * 7 * n
    assert update_bytes(plan(ranks=8, parallel="fsdp")) == 4 * 7 * n // 8
    assert update_bytes(plan(train={"average": "ema"})) == 4 * 10 * n


def test_a_ring_is_as_fast_as_its_slowest_part():
    assert link_rate(H100, 8) == 450
    assert link_rate(H100, 16) == 8 * 50
    assert link_rate(replace(H100, network_gb_per_s=1e6), 16) == 450


def test_half_the_share_takes_twice_the_time(plan):
    made = plan(ranks=4)
    fast, slow = (times(made, H100, Assumed(products=x, links=x)) for x in (0.5, 0.25))
    assert slow.products == 2 * fast.products
    assert slow.sending == 2 * fast.sending
    assert slow.update == fast.update
    assert fast.hidden <= fast.open == fast.products + fast.update + fast.sending


def test_shares_are_shares():
    for name in ("products", "links", "room"):
        for value in (0.0, 1.1):
            with pytest.raises(ValueError, match=f"the share {name}={value}"):
                Assumed(**{name: value})


def test_the_largest_batch_fits_and_a_larger_one_does_not(plan):
    for parallel in ("ddp", "fsdp"):
        made = plan(ranks=4, parallel=parallel, train={"accumulate": 2})
        small = replace(H100, memory_gb=0.05)
        n = largest_batch(made, small, ASSUMED)
        assert n > 0, parallel
        assert n % 8 == 0, parallel
        settings = {"accumulate": 2, "batch_size": n}
        assert fits(plan(ranks=4, parallel=parallel, train=settings), small, ASSUMED), parallel
        settings["batch_size"] += 8
        assert not fits(plan(ranks=4, parallel=parallel, train=settings), small, ASSUMED), parallel
        assert largest_batch(made, replace(H100, memory_gb=0.001), ASSUMED) == 0, parallel


def test_sending_dominates_from_the_number_on_that_is_said(plan):
    settings = {"batch_size": 64}
    made = plan({"d_model": 256, "mem_len": 64}, settings)
    slow = replace(H100, nvlink_gb_per_s=100.0)
    bound = bound_by_sending_from(made, slow, ASSUMED)
    assert bound is not None
    for ranks in (2, 4, 8, 16, 32, 64):
        taken = times(replace(made, ranks=ranks), slow, ASSUMED)
        assert taken.is_bound_by_sending == (ranks >= bound)
    ideal = replace(H100, nvlink_gb_per_s=1e9, network_gb_per_s=1e9)
    assert bound_by_sending_from(made, ideal, ASSUMED) is None


def test_streams_are_the_most_gpus(plan):
    assert most_gpus(plan(train={"batch_size": 24, "accumulate": 2})) == 12
