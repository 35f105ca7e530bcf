"""Which way computes the operation, and why."""

from contextlib import suppress
from inspect import unwrap

import pytest
import torch

from transformer_xl import ops
from transformer_xl.ops import BACKENDS, choose_backend, rel_attention, use_backend


def chosen(device="cpu", dtype=torch.float32, K=64):
    return choose_backend(torch.device(device), dtype, K).backend


@pytest.mark.parametrize("is_compiling", [False, True])
def test_the_kernels_are_chosen_where_they_can_compute(monkeypatch, is_compiling):
    monkeypatch.setattr(ops.triton, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    # A compiler fuses the reference.
    plain = "reference" if is_compiling else "skew"
    assert chosen("cuda", torch.bfloat16) == chosen("cuda", K=128) == "triton"
    assert chosen("cuda", torch.float64) == chosen("cuda", K=129) == chosen("cpu") == plain
    with use_backend("reference"):
        assert chosen("cuda", torch.bfloat16) == "reference"


def test_a_choice_says_why(monkeypatch):
    def reason(device, dtype=torch.float32, K=64):
        return choose_backend(torch.device(device), dtype, K).reason

    assert "for a GPU, not for cpu" in reason("cpu")
    monkeypatch.setattr(ops.triton, "find_spec", lambda name: None)
    assert "Triton is not installed" in reason("cuda")
    monkeypatch.setattr(ops.triton, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 7.5 is below 8.0" in reason("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "do not compute torch.float64" in reason("cuda", torch.float64)
    assert "width 129 are wider than 128" in reason("cuda", K=129)
    assert "fused kernels" in reason("cuda")
    with use_backend("triton"):
        assert reason("cuda") == "chosen by use_backend"


def test_a_chosen_backend_holds_inside_its_block():
    with use_backend("reference"):
        assert chosen() == "reference"
        with suppress(KeyError), use_backend("skew"):
            assert chosen() == "skew"
            raise KeyError
        assert chosen() == "reference"
        with use_backend("auto"):
            assert chosen() == "skew"
    assert chosen() == "skew"


@pytest.mark.parametrize("backend", ["reference", "skew"])
def test_the_chosen_backend_is_the_one_that_computes(backend, monkeypatch):
    monkeypatch.setitem(BACKENDS, backend, lambda *inputs, **options: inputs[0])
    shapes = [(1, 2, 1, 2), (1, 3, 1, 2), (1, 3, 1, 2), (3, 1, 2), (1, 2), (1, 2)]
    inputs = [torch.randn(shape) for shape in shapes]
    with use_backend(backend):
        assert rel_attention(*inputs) is inputs[0]
    other = next(name for name in BACKENDS if name != backend)
    with use_backend(other):
        assert rel_attention(*inputs) is not inputs[0]


def test_an_unknown_backend_is_named():
    # Unwrapped: the check of types in signatures, where it is on, refuses it before we can.
    with pytest.raises(ValueError, match="'flash' is unknown; choose from auto, reference, skew"):
        next(unwrap(use_backend)("flash"))
