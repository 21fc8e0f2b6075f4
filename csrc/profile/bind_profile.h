// Ranges and timers as Python sees them; included by bindings.cpp.
#pragma once

#include <torch/extension.h>

#include <optional>

#include "profile/range.h"

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
          "In 8 bits; a multiply-add is two.");
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
  py::class_<PythonRange>(
      m, "Range",
      "with Range(\"route\"): an NVTX range, and a timer, on this thread, by the name of an op.\n\n"
      "Costs nothing that could be measured where no tool listens and no times are taken.")
      .def(py::init<const std::string&>(), py::arg("op"))
      .def("__enter__", &PythonRange::enter)
      .def("__exit__", [](PythonRange& range, const py::args&) { range.exit(); });
}

}  // namespace pyserve
