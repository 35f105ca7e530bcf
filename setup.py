"""Compiles the step of decoding (ops/native.cpp); all else is in pyproject.toml.

The library needs neither Python nor torch: one wheel for each platform serves all versions. Where
it cannot be compiled, the installation goes on without it.
"""

import copy
import platform
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# One for each level of vector instructions, as torch names them: torch.backends.cpu.
LEVELS = {"default": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS = {
        "avx2": ["-mavx2", "-mfma"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"],
    }
# GCC 12 warns of variables in its own headers.
NO_WARNING = "-Wno-maybe-uninitialized"
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-pthread", NO_WARNING]
OPS = Path("src/transformer_xl/ops")
# Python without the global lock has no limited interface.
IS_LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildExtensions(build_ext):
    """Gives each extension a folder of its own, as all have one source, and so one object file."""

    def build_extension(self, ext: Extension) -> None:
        """Build an extension."""
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp) / ext.name)
        super(BuildExtensions, own).build_extension(ext)


setup(
    cmdclass={"build_ext": BuildExtensions},
    # The sources use vector extensions of GCC and Clang.
    ext_modules=[
        Extension(
            f"transformer_xl.ops._native_{level}",
            [str(OPS / "native.cpp")],
            depends=[str(path) for path in OPS.glob("native_*.h")],
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-pthread"],
            language="c++",
            py_limited_api=IS_LIMITED,
            optional=True,
        )
        for level, flags in LEVELS.items()
        if sys.platform != "win32"
    ],
    options={
        "bdist_wheel": {"py_limited_api": "cp311"} if IS_LIMITED else {},
        "build_ext": {"parallel": 2},
    },
)
