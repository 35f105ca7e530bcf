"""The compiled step computes what the operations of torch do, on any processor."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import transformer_xl
from transformer_xl.config import ModelConfig
from transformer_xl.model import TransformerXL
from transformer_xl.model.compact import compact
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.stepper import NativeStepper, RingStepper
from transformer_xl.ops import native

pytestmark = pytest.mark.skipif(
    native.library() is None,
    reason=str(native.reason_against(torch.device("cpu"), torch.float32)),
)

CONFIG = ModelConfig(
    vocab_size=50, n_layer=3, n_head=4, d_model=48, d_inner=72, mem_len=40, dropout=0.0
)
VARIANTS = {
    "post-norm": {},
    "pre-norm": {"norm_first": True, "final_norm": True},
    "RMS norm": {"norm_first": True, "norm": "rms"},
    "GELU": {"activation": "gelu"},
    "GEGLU": {"activation": "geglu"},
    "SwiGLU": {"activation": "swiglu"},
    "squared ReLU": {"activation": "relu_squared"},
    "normalized queries and keys": {"qk_norm": True},
    "learned distances": {"attn_type": 1, "n_positions": 30},
    "biases of each layer": {"tie_biases": False},
    "widths that fill no vector": {"d_model": 82, "d_head": 41, "n_head": 2, "d_inner": 91},
    "limited attention": {"attn_len": 17},
    "clamped distances": {"clamp_len": 9},
    "documents": {"reset_at": 5},
}


def model_of(dtype=torch.float64, **settings):
    torch.manual_seed(0)
    model = TransformerXL(replace(CONFIG, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Also those that begin with zeros.
            parameter += 0.05 * torch.randn_like(parameter)
    return model.to(dtype)


def both(model, batch_size):
    lengths, memory = Lengths.of(model.config), model.keep(model.start_memory(batch_size))
    return [kind(model, lengths, memory) for kind in (RingStepper, NativeStepper)]


def tokens_for(model, batch_size, n):
    return torch.randint(model.config.vocab_size, (n, batch_size))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("batch_size", [1, 3, 5, 9, 33])
def test_the_compiled_step_is_that_of_torch(variant, batch_size):
    model = model_of(**VARIANTS[variant])
    ring, compiled = both(model, batch_size)
    for n, tokens in enumerate(tokens_for(model, batch_size, 60)):
        torch.testing.assert_close(compiled(tokens), ring(tokens), rtol=1e-11, atol=1e-12)
        if n == 20:
            for stepper in (ring, compiled):
                stepper.reset([batch_size - 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_size", [1, 3, 9])
def test_in_lower_precision_its_error_is_not_larger_than_that_of_torch(dtype, batch_size):
    model = model_of(dtype, norm_first=True, final_norm=True)
    exact, _ = both(model_of(dtype, norm_first=True, final_norm=True).double(), batch_size)
    ring, compiled = both(model, batch_size)
    errors = {"torch": 0.0, "compiled": 0.0}
    for tokens in tokens_for(model, batch_size, 60):
        expected = exact(tokens)
        for name, stepper in (("torch", ring), ("compiled", compiled)):
            error = (stepper(tokens).double() - expected).abs().max().item()
            errors[name] = max(errors[name], error)
    # The rule of all operations: twice the error of the reference in that precision.
    assert errors["compiled"] <= 2 * errors["torch"]


def test_matrices_in_int8_are_those_of_the_quantized_model():
    model = compact(model_of(torch.float32), "int8")
    ring, compiled = both(model, 2)
    for tokens in tokens_for(model, 2, 60):
        torch.testing.assert_close(compiled(tokens), ring(tokens), rtol=0.05, atol=0.1)


@pytest.mark.parametrize("batch_size", [1, 9])
def test_results_do_not_depend_on_the_number_of_threads(batch_size, monkeypatch):
    model = model_of(torch.float32)
    found = []
    for n_threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=n_threads: n)
        torch.manual_seed(0)
        _, compiled = both(model, batch_size)
        found.append(torch.stack([compiled(x) for x in tokens_for(model, batch_size, 60)]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_threads_that_step_at_the_same_time_do_not_disturb_each_other(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = model_of(torch.float32)
    tokens = tokens_for(model, 1, 300)
    found = {}

    def work(name):
        _, compiled = both(model, 1)
        found[name] = torch.stack([compiled(x) for x in tokens])

    work("alone")
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(4):
        assert torch.equal(found[n], found["alone"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_steps_with_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = model_of(torch.float32)
    tokens = tokens_for(model, 1, 50)
    _, compiled = both(model, 1)
    expected = torch.stack([compiled(x) for x in tokens])
    child = os.fork()
    if child == 0:
        # Nothing of pytest may run here.
        code = 1
        # OpenMP, which torch uses, would wait for threads that only the parent has.
        torch.set_num_threads(1)
        signal.alarm(60)
        try:
            _, compiled = both(model, 1)
            code = 0 if torch.equal(torch.stack([compiled(x) for x in tokens]), expected) else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_weights_that_change_in_place_are_used_as_they_are():
    model = model_of()
    ring, compiled = both(model, 2)
    tokens = tokens_for(model, 2, 2)
    compiled(tokens[0]), ring(tokens[0])
    with torch.no_grad():
        model.layers[0].feed_forward.inner.weight.mul_(1.5)
        model.layers[1].attention_norm.bias.add_(1.0)
    torch.testing.assert_close(compiled(tokens[1]), ring(tokens[1]), rtol=1e-11, atol=1e-12)


SAME = """
import torch
from tests_of_native import both, model_of, tokens_for
from transformer_xl.ops import native
for batch_size in (1, 9):
    model = model_of(norm_first=True)
    ring, compiled = both(model, batch_size)
    for tokens in tokens_for(model, batch_size, 60):
        torch.testing.assert_close(compiled(tokens), ring(tokens), rtol=1e-11, atol=1e-12)
print(native.level())
"""


@pytest.mark.skipif(native.level() != "avx512", reason="this processor has no lower level to try")
def test_the_library_for_older_processors_computes_the_same(tmp_path):
    shutil.copy(__file__, tmp_path / "tests_of_native.py")
    source = str(Path(transformer_xl.__file__).parents[1])
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "PYTHONPATH": source}
    done = subprocess.run(
        [sys.executable, "-c", SAME], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("avx2", 0), done.stderr
