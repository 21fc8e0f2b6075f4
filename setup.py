"""Builds the compiled extension ``pyserve._C``; everything else is in pyproject.toml.

The C++ sources are always built. The CUDA sources are added where ``nvcc`` and a torch with CUDA are
present; ``PYSERVE_CUDA=0`` leaves them out, ``PYSERVE_CUDA=1`` insists on them. There is no
``-march=native``: the kernels choose their instruction set at run time, so a build can be copied.
"""

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.errors import PlatformError


def find_cuda() -> None:
    """Set ``CUDA_HOME``, before torch guesses it, to what nvcc itself calls its top folder."""
    if "CUDA_HOME" in os.environ or "CUDA_PATH" in os.environ or not shutil.which("nvcc"):
        return
    command = ["nvcc", "--dryrun", "-E", "-x", "cu", os.devnull]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    if found := re.search(r"^#\$ TOP=(.+)$", shown, re.MULTILINE):
        os.environ["CUDA_HOME"] = str(Path(found[1]).resolve())


find_cuda()
try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    raise SystemExit(
        "pyserve: torch is needed to build the extension, and a build without isolation uses what is"
        " installed. First run:\n"
        "    pip install 'torch==2.13.0' 'setuptools>=77' wheel ninja"
    ) from error

ROOT = Path(__file__).parent
NO_COMPILER = """no C++ compiler ({compiler!r} was looked for). Install one and run pip again:
    Debian, Ubuntu:  apt-get install build-essential python3-dev
    Fedora, RHEL:    dnf install gcc-c++ python3-devel
    macOS:           xcode-select --install
CXX=/path/to/compiler chooses another. GCC 11 or Clang 14 is the oldest that will do (C++20)."""
NO_HEADERS = """Python's own headers are missing ({header} was looked for). Install them and run pip again:
    Debian, Ubuntu:  apt-get install python3-dev
    Fedora, RHEL:    dnf install python3-devel"""


def sources(suffix: str) -> list[str]:
    """The extension's sources with ``suffix``, relative to this file, in a fixed order."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob(f"*{suffix}"))


def missing_for_cuda() -> str | None:
    """What this machine lacks to build the CUDA sources; None where nothing is missing."""
    if torch.version.cuda is None:
        return f"the installed torch ({torch.__version__}) is built without CUDA"
    if cpp_extension.CUDA_HOME is None or not Path(cpp_extension.CUDA_HOME, "bin", "nvcc").exists():
        return "nvcc was not found (is the CUDA toolkit installed? CUDA_HOME points to it)"
    if not Path(cpp_extension.CUDA_HOME, "include", "cuda.h").exists():
        return f"there is no include/cuda.h in {cpp_extension.CUDA_HOME} (CUDA_HOME)"
    return None


def with_cuda() -> bool:
    """Whether to build the CUDA sources: ``PYSERVE_CUDA`` if set, else where they can be built."""
    wish = os.environ.get("PYSERVE_CUDA", "").strip()
    if wish not in ("", "0", "1"):
        raise SystemExit(f"pyserve: PYSERVE_CUDA is 0, 1 or unset, not {wish!r}")
    missing = missing_for_cuda()
    if wish == "1" and missing is not None:
        raise SystemExit(f"pyserve: PYSERVE_CUDA=1, but {missing}")
    if wish == "0" or not sources(".cu"):
        return False
    if missing is not None:
        print(f"pyserve: without CUDA, since {missing}")
    return missing is None


def compile_jobs() -> int:
    """Compilers to run at once: one a core, but no more than memory holds (2 GiB each)."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores, memory // (2 << 30)))


class BuildExtension(cpp_extension.BuildExtension):
    """torch's, with clear messages for what is missing and room for ``x.cu`` beside ``x.cpp``."""

    def run(self) -> None:
        compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
        if any(shutil.which(word) is None for word in shlex.split(compiler)[:1]):
            raise PlatformError(NO_COMPILER.format(compiler=compiler))
        header = Path(sysconfig.get_path("include"), "Python.h")
        if not header.exists():
            raise PlatformError(NO_HEADERS.format(header=header))
        os.environ.setdefault("MAX_JOBS", str(compile_jobs()))
        super().run()

    def build_extension(self, ext: Extension) -> None:
        # Objects are named after their source without its suffix, so pack.cu would overwrite pack.cpp's.
        cuda = [source for source in ext.sources if source.endswith(".cu")]
        if cuda:
            ext.sources = [source for source in ext.sources if source not in cuda]
            ext.extra_objects += self.compiler.compile(
                cuda,
                output_dir=str(Path(self.build_temp, "cuda")),
                macros=ext.define_macros,
                include_dirs=ext.include_dirs,
                extra_postargs=ext.extra_compile_args,
            )
        super().build_extension(ext)


def extension() -> Extension:
    """``pyserve._C``. Contraction is off: a multiply-add is fused where the source says so, so that two
    builds, and two tile shapes of one kernel, give the same bits."""
    cxx = ["-O3", "-std=c++20", "-Wall", "-fvisibility=hidden", "-ffp-contract=off", "-g0"]
    cxx.append("-fno-math-errno")  # sqrt is an instruction, not a call
    include = [str(ROOT / "csrc")]
    if not with_cuda():
        return cpp_extension.CppExtension(
            "pyserve._C", sources(".cpp"), include_dirs=include, extra_compile_args={"cxx": cxx}
        )
    if not torch.cuda.is_available():  # torch would otherwise choose every architecture it knows
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    return cpp_extension.CUDAExtension(
        "pyserve._C",
        sources(".cpp") + sources(".cu"),
        include_dirs=include,
        define_macros=[("PYSERVE_WITH_CUDA", None)],
        extra_compile_args={"cxx": cxx, "nvcc": ["-O3", "-std=c++20", "--fmad=false"]},
    )


setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True)},
)
