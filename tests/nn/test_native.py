"""The compiled step computes what the operations of torch do, on any processor."""

import os
import shutil
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import transformer_xl
from transformer_xl.config import ModelConfig
from transformer_xl.model import TransformerXL
from transformer_xl.model.decoder import CachedDecoder, Decoder, EagerDecoder, choose_step
from transformer_xl.model.quantizing import compact
from transformer_xl.model.segment import Lengths
from transformer_xl.model.steps import CompiledStep
from transformer_xl.ops import PackedWeight, native

pytestmark = pytest.mark.skipif(
    native.library() is None,
    reason=str(native.reason_against(torch.device("cpu"), torch.float32)),
)

CONFIG = ModelConfig(
    vocab_size=50, n_layer=3, n_head=4, d_model=48, d_inner=72, mem_len=20, dropout=0.0
)
VARIANTS = {
    "post-norm": {},
    "RMS norm": {"norm_first": True, "norm": "rms"},
    "GELU": {"activation": "gelu"},
    "GEGLU": {"activation": "geglu"},
    "SwiGLU": {"activation": "swiglu"},
    "squared ReLU": {"activation": "relu_squared"},
    "normalized queries and keys": {"qk_norm": True},
    "widths that fill no vector": {"d_model": 82, "d_head": 41, "n_head": 2, "d_inner": 91},
    "documents": {"reset_at": 5},
    "embedding residuals": {"norm_first": True, "embedding_residual": True},
    "key offset": {"key_offset": True, "qk_norm": True, "reset_at": 5},
    "scalable softmax": {"scalable_softmax": 4, "qk_norm": True, "attn_len": 9},
    "attention lengths by layer, documents": {
        "layer_attn_lens": (3, 30, 9),
        "key_offset": True,
        "scalable_softmax": 4,
        "reset_at": 5,
    },
    "key offset in heads of odd width": {"key_offset": True, "d_head": 7},
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
    lengths = Lengths.of(model.config).windowed(model.config)
    memory = model.keep(model.start_memory(batch_size))
    return EagerDecoder(model, lengths, memory), CachedDecoder(model, lengths, memory, CompiledStep)


def tokens_for(model, batch_size, n):
    return torch.randint(model.config.vocab_size, (n, batch_size))


def assert_as_exact(model, exact, batch_size):
    """The rule of all operations: at most twice the error of the reference in that precision."""
    decoders, right = both(model, batch_size), both(exact, batch_size)[0]
    errors = [0.0, 0.0]
    for tokens in tokens_for(model, batch_size, 30):
        expected = right(tokens)
        for n, decoder in enumerate(decoders):
            errors[n] = max(errors[n], (decoder(tokens).double() - expected).abs().max().item())
    assert errors[1] <= 2 * errors[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_compiled_step_is_that_of_torch(variant):
    model = model_of(**VARIANTS[variant])
    for batch_size in (1, 3, 5, 9, 33):
        called, compiled = both(model, batch_size)
        for n, tokens in enumerate(tokens_for(model, batch_size, 24)):
            torch.testing.assert_close(
                compiled(tokens),
                called(tokens),
                rtol=1e-11,
                atol=1e-12,
                msg=f"{batch_size} streams",
            )
            # Beyond the memory, of which one stream forgets the beginning.
            if n == 10:
                for decoder in (called, compiled):
                    decoder.reset([batch_size - 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_size", [1, 3, 9])
def test_in_lower_precision_its_error_is_not_larger_than_that_of_torch(dtype, batch_size):
    model = model_of(dtype, norm_first=True, final_norm=True)
    exact = model_of(dtype, norm_first=True, final_norm=True).double()
    assert_as_exact(model, exact, batch_size)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("batch_size", [1, 2, 9])
def test_packed_matrices_are_those_of_the_quantized_model(batch_size, weights):
    model = compact(model_of(torch.float32), weights)
    exact = model_of(torch.float32).double()
    with torch.no_grad():
        exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()}, strict=False)
        for name, module in model.named_modules():
            if isinstance(packed := getattr(module, "weight", None), PackedWeight):
                exact.get_submodule(name).weight.copy_(packed.dequantize())
    assert_as_exact(model, exact, batch_size)


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_steps_with_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model, small = model_of(torch.float32), model_of(torch.float32, d_model=8, d_inner=8)
    tokens = tokens_for(model, 9, 50)
    _, compiled = both(model, 9)
    expected = torch.stack([compiled(x) for x in tokens])
    # The buffers of a thread are kept: in the child they are too small for its first step.
    both(small, 1)[1](tokens_for(small, 1, 1)[0])
    child = os.fork()
    if child == 0:
        # Nothing of pytest may run here.
        code = 1
        # OpenMP, which torch uses, would wait for threads that only the parent has.
        torch.set_num_threads(1)
        signal.alarm(60)
        try:
            _, compiled = both(model, 9)
            code = 0 if torch.equal(torch.stack([compiled(x) for x in tokens]), expected) else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_the_step_cannot_read_is_read_by_torch():
    model, lengths = model_of(torch.float32), Lengths.of(CONFIG)
    memory = model.keep(model.start_memory(2))
    assert Decoder.of(model, lengths, memory).kind == "compiled"
    # Keys and values in another precision, one matrix in another, a tensor of another class.
    assert Decoder.of(model, lengths, memory.to(dtype=torch.float64)).kind == "eager"
    model.layers[1].feed_forward.outer.double()
    assert choose_step(model)[0] is None
    assert "float64" in choose_step(model)[1]
    model.layers[1].feed_forward.outer.float()
    weight = model.layers[2].attention.o_proj.weight
    model.layers[2].attention.o_proj.weight = nn.Parameter(weight.as_subclass(Other))
    assert "cannot read a Other" in choose_step(model)[1]


class Other(torch.Tensor):
    pass


SAME = """
import torch
from tests_of_native import both, model_of, tokens_for
from transformer_xl.ops import PackedWeight, native
for batch_size in (1, 9):
    model = model_of(norm_first=True)
    called, compiled = both(model, batch_size)
    for tokens in tokens_for(model, batch_size, 60):
        torch.testing.assert_close(compiled(tokens), called(tokens), rtol=1e-11, atol=1e-12)
print(native.level())
"""


@pytest.mark.slow
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


@pytest.mark.parametrize("n_rows", [1, 3, 5, 16, 19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_of_few_rows_is_that_of_torch(n_rows, dtype):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(n_rows, 37), torch.randn(203, 37), torch.randn(203)
    exact = x.double() @ weight.double().T + bias.double()
    error = 1e-5 if dtype == torch.float32 else 1e-12
    for each in (bias.to(dtype), None):
        found = native.product(x.to(dtype), weight.to(dtype), each)
        expected = exact if each is not None else exact - bias.double()
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=error)
    # A slice of a larger matrix has the stride of that.
    columns = torch.randn(203, 50, dtype=dtype)[:, 5:42]
    found = native.product(x.to(dtype), columns, None)
    torch.testing.assert_close(found.double(), x.double() @ columns.double().T, rtol=0, atol=error)


def test_the_softmax_of_few_rows_is_that_of_torch(monkeypatch):
    model = model_of(torch.float32)
    hidden = torch.randn(2, 3, CONFIG.d_model)
    with torch.no_grad():
        assert native.multiplies(hidden, model.softmax.weight)
        found = model.softmax(hidden)
        monkeypatch.setenv("TXL_NATIVE", "0")
        assert not native.multiplies(hidden, model.softmax.weight)
        torch.testing.assert_close(found, model.softmax(hidden))
    monkeypatch.delenv("TXL_NATIVE")
    # Gradients, autocast and other precisions are left to torch.
    assert not native.multiplies(hidden, model.softmax.weight)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert not native.multiplies(hidden, model.softmax.weight)
    with torch.no_grad():
        assert not native.multiplies(hidden.half(), model.softmax.weight.half())
        assert not native.multiplies(torch.randn(17, 48), model.softmax.weight)


@pytest.mark.slow
@pytest.mark.compile
def test_transforms_and_recordings_see_the_product():
    model, x = model_of(torch.float32).requires_grad_(False), torch.randn(1, 2, CONFIG.d_model)
    with torch.no_grad():
        expected = model.softmax(x)
        torch.testing.assert_close(torch.vmap(model.softmax)(x), expected)
        with warnings.catch_warnings():
            # That sizes of the input become constants.
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(lambda y: model.softmax(y), (x,), check_trace=False)
        torch.testing.assert_close(traced(2 * x), model.softmax(2 * x))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            assert forward_ad.unpack_dual(model.softmax(dual)).tangent is not None
