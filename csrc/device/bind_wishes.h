// What Python needs to draw tokens on a device; included by bindings.cpp.
#pragma once

#include <torch/extension.h>

#include <algorithm>

#include "device/launch.h"
#include "device/wishes.h"
#include "tensors.h"

namespace pyserve {

namespace py = pybind11;

inline std::tuple<at::Tensor, int64_t, py::dict> pack_wish_rows(const BlockPool& pool,
                                                                const SamplerState& state,
                                                                const at::Tensor& rows,
                                                                int64_t vocabulary) {
  const auto row_ids = ints(rows, "rows");
  const PackedWishes packed = pack_wishes(pool, state, row_ids, vocabulary);
  py::dict failed;
  for (const auto& [index, reason] : packed.failures) failed[py::int_(index)] = reason;
  return {int_tensor(packed.words), std::min(top_width(state, row_ids), vocabulary), failed};
}

inline void bind_wishes(py::module_& m) {
  m.def("pack_wishes", &pack_wish_rows, py::arg("pool"), py::arg("state"), py::arg("rows"),
        py::arg("vocabulary"),
        R"(What the op `draw` takes: (wishes, width, failed).

wishes int32, in one piece so that one copy brings it to a device; width is the most top log-probabilities that
any row asks for; failed {index into rows: why} must not be drawn.)");
  m.def(
      "emulate_lanes",
      [](int lanes) {
        if (lanes < 1 || lanes > 64) throw std::invalid_argument("lanes must be in 1..64");
        OnCpu::emulated_lanes = lanes;
      },
      py::arg("lanes"),
      "For tests: bodies that CUDA runs by many threads a row run by this many on the CPU (1: "
      "off).");
}

}  // namespace pyserve
