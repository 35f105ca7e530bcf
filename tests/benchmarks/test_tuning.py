from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAMS = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.mark.slow
def test_what_was_compiled_beforehand_is_what_is_launched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter compiles nothing")
    monkeypatch.syspath_prepend(str(PROGRAMS))
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    resources, tune = import_module("resources"), import_module("tune")
    made: dict[str, list[str]] = {"beforehand": [], "launched": []}

    class Recording(resources.Compiled):
        """Writes down which compilation each launch asks for."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launch = super().__getitem__(grid)

            def recorded(*arguments: Any, **options: Any) -> None:
                launch(*arguments, **options)
                made[now].append(self.made.hash)

            return recorded

    monkeypatch.setattr(resources, "Compiled", Recording)
    monkeypatch.setattr(resources.driver, "_active", resources.NoGPU(90))
    # 16 divides none of the lengths; one stream; 16 divides the number of streams.
    for shape in (tune.Shape(3, 24, 40, 2), tune.Shape(1, 24, 40, 2), tune.Shape(16, 32, 8, 2)):
        now = "beforehand"
        for kernel in resources.KERNELS:
            resources.compile_kernel(kernel, torch.bfloat16, 32, shape=shape)
        now = "launched"
        with ExitStack() as stack:
            for kernel in resources.KERNELS:
                stack.enter_context(resources.stand_in(kernel))
            for launch in tune.launches(shape, "bfloat16", 32, "cpu").values():
                launch()
    assert set(made["beforehand"]) == set(made["launched"])
    assert len(set(made["beforehand"])) > 4


def test_every_division_of_a_step_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("runs in Triton's interpreter with TRITON_INTERPRET=1")
    monkeypatch.syspath_prepend(str(PROGRAMS))
    tune_step = import_module("tune_step")
    monkeypatch.setattr(tune_step.triton.testing, "do_bench_cudagraph", lambda step, **how: 1.0)
    step = tune_step.Step(tune_step.Shape(2, 70, 2), 16, "cpu", 20_000)
    assert len(step.rings) == 2
    expected = step()
    for slots, warps in tune_step.SLOTS:
        for is_ahead in (False, True):
            blocks = tune_step.kernels.StepBlocks(slots, warps, is_ahead)
            monkeypatch.setitem(tune_step.kernels.STEP_BLOCKS, "few", blocks)
            assert tune_step.measured(step, expected) == 1e-3
    expected[1] += 1
    assert tune_step.measured(step, expected) is None
