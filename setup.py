"""Builds the compiled extension ``pyserve._C``; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
SOURCES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cpp"))

setup(
    ext_modules=[
        CppExtension(
            "pyserve._C",
            SOURCES,
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args=["-O3", "-std=c++20", "-Wall", "-fvisibility=hidden", "-g0"],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True)},
)
