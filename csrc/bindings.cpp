// Every op and class that the extension offers, with its schema and docstring, in one place.
#include <torch/extension.h>

TORCH_LIBRARY(pyserve, m) {}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "pyserve's compiled core: scheduling, batching, kernels and the decoder forward pass.";
}
