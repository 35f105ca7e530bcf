"""Weights are counted as they are, and streams are divided evenly or not at all."""

import pytest
import torch

from transformer_xl.apps.estimate import count_weights
from transformer_xl.apps.estimate.plan import layer_matrices, muon_weights, optimizer_numbers
from transformer_xl.config import ModelConfig
from transformer_xl.model import TransformerXL
from transformer_xl.train.optim import Optimizer, new_average

VARIANTS = {
    "the paper": {},
    "not tied": {"tie_embeddings": False, "tie_biases": False},
    "other widths": {"d_head": 5, "d_embed": 10},
    "clusters": {"cutoffs": (200, 600)},
    "narrower clusters": {"cutoffs": (200, 600), "div_val": 2, "tie_projections": True},
    "gated units": {"activation": "swiglu"},
    "residuals of the inputs": {"input_recurrence": True, "embedding_residual": True},
    "value residuals": {"value_residual": True},
    "attention lengths by layer": {"layer_attn_lens": (4, 8, 16)},
    "gates": {"norm_first": True, "gate": "gru"},
    "learned distances": {"attn_type": 1, "n_positions": 9},
    "sinusoids": {"attn_type": 2},
    "other norms": {"norm": "rms", "qk_norm": True, "final_norm": True},
}


def test_weights_are_those_of_the_model(plan):
    for changed in VARIANTS.values():
        config = plan(changed).config.model
        model = TransformerXL(config)
        counted = count_weights(config)
        assert counted.total == sum(p.numel() for p in model.parameters()), changed
        assert counted.layer == sum(p.numel() for p in model.layers[0].parameters()), changed
        assert counted.largest == max(p.numel() for p in model.parameters()), changed
        matrices = sum(rows * columns for rows, columns in layer_matrices(config))
        in_layer = [p.numel() for p in model.layers[0].parameters() if p.ndim == 2]
        assert matrices == sum(in_layer), changed


def test_a_published_model_is_counted_without_building_it():
    config = ModelConfig(
        vocab_size=267_735,
        n_layer=18,
        n_head=16,
        d_model=1024,
        d_inner=4096,
        cutoffs=(20_000, 40_000, 200_000),
        div_val=4,
        tie_projections=(False, True, True, True),
    )
    assert count_weights(config).total == 285_170_506


def test_what_an_optimizer_keeps_is_counted(plan):
    for name in ("adamw", "muon", "lamb"):
        for changed in ({}, VARIANTS["gates"]):
            config = plan(changed, {"optimizer": name, "average": "ema"}).config
            model = TransformerXL(config.model)
            optimizer = Optimizer(model, config.train)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step(1.0)
            kept = [x.numel() for x in optimizer.tensors().values() if x.ndim]
            assert sum(kept) == optimizer_numbers(config), name
            momenta = (x for key, x in optimizer.tensors().items() if key.endswith("momentum"))
            assert sum(x.numel() for x in momenta) == muon_weights(config), name
            average = new_average(model, config.train)
            assert average is not None, name
            n_averaged = sum(p.numel() for p in average.parameters())
            assert n_averaged == count_weights(config.model).total, name


def test_streams_that_cannot_be_divided_are_refused(plan):
    for gpus in (3, 16, 0):
        with pytest.raises(ValueError, match=f"gpus={gpus}"):
            plan(ranks=gpus)


def test_parts_are_divided_too(plan):
    assert plan(train={"accumulate": 2}, ranks=4).B == 1
    with pytest.raises(ValueError, match=r"gpus=4 with train.accumulate=4: give a multiple of 16"):
        plan(train={"accumulate": 4}, ranks=4)


def test_what_is_no_transformer_xl_is_refused(plan):
    with pytest.raises(ValueError, match=r"model.kind='lstm'"):
        plan({"kind": "lstm", "n_head": 8, "d_inner": 2048, "mem_len": 0})
    with pytest.raises(ValueError, match="vocab_size=0"):
        plan({"vocab_size": 0})


def test_the_longest_stage_decides_the_memory(plan):
    stages = ((0.0, 96, 16), (0.5, 48, 32))
    made = plan(train={"stages": stages})
    assert (made.T, made.M) == (96, 32)
