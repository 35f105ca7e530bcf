"""The device and the precision are chosen by what the hardware computes."""

import pytest
import torch

from transformer_xl.apps import doctor
from transformer_xl.cli.science import _environment
from transformer_xl.config.device import Precision, describe_machine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("gpu", [None, "A GPU"])
def test_whoever_describes_the_machine_says_the_same(monkeypatch, gpu):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "A processor"})
    if gpu is not None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: gpu)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    machine = describe_machine()
    assert machine["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert (machine["processor"], machine["gpu"]) == ("A processor", gpu)
    threads = machine["threads"]
    monkeypatch.setattr(doctor, "_speed", lambda *_: "")
    told = doctor.diagnose()
    assert (told["processor"], told["threads"]) == ("A processor", threads)
    assert told["device"] == (gpu or "cpu")
    told = _environment()
    assert (told["processor"], told["gpu"], told["threads"]) == ("A processor", gpu, threads)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2": True, "avx512_bf16": False}, "float32"),
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_a_processor_computes_in_bfloat16_only_where_it_has_the_instructions(
    monkeypatch, capabilities, expected
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert Precision("auto", CPU).name == expected


@pytest.mark.parametrize(("supported", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_a_gpu_that_only_emulates_bfloat16_computes_in_float32(monkeypatch, supported, expected):
    def is_supported(including_emulation):
        return supported or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert Precision("auto", CUDA).name == expected


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_products_are_computed_in_the_precision_and_weights_stay(precision):
    x = torch.randn(4, 4, requires_grad=True)
    with Precision(precision, CPU).autocast():
        product = x @ x
    assert product.dtype == getattr(torch, precision)
    product.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == x.dtype == torch.float32
    assert (x @ x).dtype == torch.float32
