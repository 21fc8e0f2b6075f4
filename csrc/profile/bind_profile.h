// Ranges and timers as Python sees them; included by bindings.cpp.
#pragma once

#include <torch/extension.h>

#include <optional>

#include "profile/limits.h"
#include "profile/range.h"
#include "profile/rows.h"

namespace pyserve {

namespace py = pybind11;

// A Range for a with statement.
class PythonRange {
 public:
  explicit PythonRange(const std::string& name) {
    const auto op = profile::op_named(name);
    TORCH_CHECK_VALUE(op.has_value(), "no op is called ", name);
    op_ = *op;
  }
  void enter() { range_.emplace(op_); }
  void exit() { range_.reset(); }

 private:
  profile::Op op_ = profile::Op::step;
  std::optional<profile::Range> range_;
};

inline py::dict stop_profile() {
  py::dict result;
  for (const profile::OpTime& time : profile::stop()) result[profile::name_of(time.op)] = time;
  return result;
}

inline double measure_read(std::int64_t working_set, double seconds, const std::string& isa) {
  TORCH_CHECK_VALUE(working_set > 0, "working_set must be positive");
  return profile::measure_read(kernels_for(isa), static_cast<std::size_t>(working_set), seconds);
}

inline double measure_peak(const std::string& kind, double seconds, const std::string& isa) {
  const Kernels& kernels = kernels_for(isa);
  using profile::Arithmetic;
  if (kind == "float32") return profile::measure_peak(kernels, Arithmetic::float32, seconds);
  if (kind == "int8") return profile::measure_peak(kernels, Arithmetic::int8, seconds);
  TORCH_CHECK_VALUE(kind == "tile", "kind must be float32, int8 or tile, got ", kind);
  return profile::measure_peak(kernels, Arithmetic::tile, seconds);
}

inline double time_rows(const std::string& op, int rows, int width, double seconds,
                        const std::string& isa) {
  return profile::time_rows(kernels_for(isa), op, rows, width, seconds);
}

inline void bind_profile(py::module_& m) {
  using profile::OpTime;
  py::class_<OpTime>(m, "OpTime", "What one op took between profile_start and profile_stop.")
      .def_readonly("calls", &OpTime::calls)
      .def_readonly("seconds", &OpTime::seconds,
                    "Its own: those of ranges inside of it are not counted.")
      .def_readonly("total_seconds", &OpTime::total_seconds, "With those of ranges inside of it.")
      .def_property_readonly(
          "memory_bytes", [](const OpTime& t) { return t.cost.memory_bytes; },
          "Bytes that come from memory whatever the code is like: weights, KV, logits.")
      .def_property_readonly(
          "cached_bytes", [](const OpTime& t) { return t.cost.cached_bytes; },
          "Bytes of activations, read and written.")
      .def_property_readonly(
          "float_operations", [](const OpTime& t) { return t.cost.float_operations; },
          "In float32; a multiply-add is two.")
      .def_property_readonly(
          "int_operations", [](const OpTime& t) { return t.cost.int_operations; },
          "In 8 bits; a multiply-add is two.")
      .def_property_readonly(
          "tile_operations", [](const OpTime& t) { return t.cost.tile_operations; },
          "Of bfloat16 in tile registers; a multiply-add is two.");
  m.def("profile_start", &profile::start, "Forgets all op times and begins to take them.");
  m.def("profile_stop", &stop_profile,
        "Ends it: {op: OpTime} of those that ran. Ranges that are still open are not counted.");
  m.def(
      "profile_ops",
      [] {
        std::vector<std::string> names;
        for (const profile::OpName& op : profile::kOps) names.emplace_back(op.name);
        return names;
      },
      "The names of all ops, which are those of the NVTX ranges too (domain \"pyserve\").");
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("measure_read", &measure_read, no_gil, py::arg("working_set"), py::arg("seconds") = 0.3,
        py::arg("isa") = "",
        "Bytes a second that all threads together read, each of its own share of that many bytes.");
  m.def("measure_peak", &measure_peak, no_gil, py::arg("kind"), py::arg("seconds") = 0.1,
        py::arg("isa") = "",
        "Operations a second (a multiply-add is two) of all threads in \"float32\", \"int8\" or "
        "\"tile\": bfloat16 in tile registers, 0 where the instruction set has none.");
  m.def(
      "time_rows", &time_rows, no_gil, py::arg("op"), py::arg("rows"), py::arg("width"),
      py::arg("seconds") = 0.05, py::arg("isa") = "",
      "Seconds that a kernel over rows of activations takes on this thread: rms_norm, layer_norm, "
      "add, silu_mul, gelu_mul, rotate or quantize. ValueError: unknown, or the width is no "
      "multiple of 64.");
  py::class_<PythonRange>(
      m, "Range",
      "with Range(\"route\"): an NVTX range, and a timer, on this thread, by the name of an op.\n\n"
      "Costs nothing that could be measured where no tool listens and no times are taken.")
      .def(py::init<const std::string&>(), py::arg("op"))
      .def("__enter__", &PythonRange::enter)
      .def("__exit__", [](PythonRange& range, const py::args&) { range.exit(); });
}

}  // namespace pyserve
