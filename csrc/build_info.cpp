// What this extension was built with, as text that can be found in the file without loading it:
// pyserve/extension.py compares it with the installed torch before the loader sees the symbols.
#include <torch/version.h>

#ifdef PYSERVE_WITH_CUDA
#include <cuda.h>
#define PYSERVE_TEXT_OF(x) #x
#define PYSERVE_TEXT(x) PYSERVE_TEXT_OF(x)
#define PYSERVE_CUDA_TEXT PYSERVE_TEXT(CUDA_VERSION)
#else
#define PYSERVE_CUDA_TEXT "none"
#endif

extern "C" __attribute__((used, visibility("default"))) const char pyserve_build_info[] =
    "pyserve-build torch=" TORCH_VERSION " cuda=" PYSERVE_CUDA_TEXT ";";
