#!/usr/bin/env bash
# Compiles every CUDA source for Ampere and Hopper, and links nothing: it works with a CPU torch and without a
# GPU. Needs nvcc on PATH and a Python with torch (PYTHON=python).
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python}
torch=$("$python" -c 'from torch.utils.cpp_extension import include_paths as p; print(*("-isystem " + i for i in p()))')
python_include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
find . -name '*.cu' | sort | while read -r source; do
  echo "nvcc $source (sm_80, sm_90)"
  # c10's CUDA headers ask for a file that only a CUDA torch has, unless told not to.
  # shellcheck disable=SC2086
  nvcc -c -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 -std=c++20 -O3 \
    -DC10_CUDA_NO_CMAKE_CONFIGURE_FILE -I. $torch -isystem "$python_include" \
    -o "$out/check.o" "$source"
done
