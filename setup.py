"""Compiles the step of decoding (ops/native.cpp); all else is in pyproject.toml.

The library needs neither Python nor torch: one wheel for each platform serves all versions.
Where it cannot be compiled, the installation goes on without it.
"""

import platform
import sys

from setuptools import Extension, setup

# One for each level of vector instructions, as torch names them: torch.backends.cpu.
LEVELS = {"default": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS = {
        "avx2": ["-mavx2", "-mfma"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"],
    }
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-pthread"]

setup(
    # The sources use vector extensions of GCC and Clang.
    ext_modules=[
        Extension(
            f"transformer_xl.ops._native_{level}",
            ["src/transformer_xl/ops/native.cpp"],
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-pthread"],
            language="c++",
            py_limited_api=True,
            optional=True,
        )
        for level, flags in LEVELS.items()
        if sys.platform != "win32"
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}, "build_ext": {"parallel": 2}},
)
