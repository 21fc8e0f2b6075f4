// Every op and class that the extension offers, with its schema and docstring, in one place: one
// function a room, called at the bottom. Tensors end here: what is called takes spans.
#include <torch/extension.h>

namespace py = pybind11;

namespace pyserve {
namespace {

// --- schedule: BlockPool, select ---------------------------------------------------------------

void bind_schedule(py::module_&) {}

// --- batch: StepBuffers, pack ------------------------------------------------------------------

void bind_batch(py::module_&) {}

// --- sampling: SamplerState, sample ------------------------------------------------------------

void bind_sampling(py::module_&) {}

// --- model: Decoder ----------------------------------------------------------------------------

void bind_model(py::module_&) {}

}  // namespace
}  // namespace pyserve

TORCH_LIBRARY(pyserve, m) {}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "pyserve's compiled core: scheduling, batching, kernels and the decoder forward pass.";
  pyserve::bind_schedule(m);
  pyserve::bind_batch(m);
  pyserve::bind_sampling(m);
  pyserve::bind_model(m);
}
