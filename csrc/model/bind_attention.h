// Attention by itself as Python sees it, for tests and measurements; included by bindings.cpp.
#pragma once

#include <torch/extension.h>

#include "model/bind_decoder.h"
#include "model/paged_attention.h"

namespace pyserve {

// A KV cache of one layer and what attends to it.
class AttentionOp {
 public:
  AttentionOp(int heads, int kv_heads, int head_dim, int num_blocks, int block_size,
              const std::string& kv_dtype, const std::string& isa)
      : heads_(heads),
        attention_(kernels_for(isa), heads),
        cache_(kernels_for(isa), kv_type_named(kv_dtype), 1, kv_heads, head_dim, num_blocks,
               block_size) {}

  void write(const at::Tensor& slots, const at::Tensor& keys, const at::Tensor& values) {
    const auto at = span_of<std::int32_t>(slots, "slots");
    const float* k = span_of<float>(keys, "keys", 3).data();
    const float* v = span_of<float>(values, "values", 3).data();
    TORCH_CHECK_VALUE(keys.size(0) == slots.size(0) && keys.size(1) == cache_.layout().kv_heads &&
                          keys.size(2) == cache_.layout().head_dim &&
                          keys.sizes() == values.sizes(),
                      "keys and values must be [slots, kv_heads, head_dim]");
    const std::ptrdiff_t width = keys.size(1) * keys.size(2);
    for (std::size_t i = 0; i < at.size(); ++i, k += width, v += width) {
      TORCH_CHECK_VALUE(0 <= at[i] && at[i] < cache_.num_blocks() * cache_.block_size(), "slot ",
                        at[i]);
      cache_.write(0, at[i], k, v);
    }
  }

  at::Tensor attend(const at::Tensor& q, const at::Tensor& cu_seqlens,
                    const at::Tensor& context_lens, const at::Tensor& block_table, int window) {
    const auto from = span_of<float>(q, "q", 3);
    const auto blocks = span_of<std::int32_t>(block_table, "block_table", 2);
    const auto ends = span_of<std::int32_t>(cu_seqlens, "cu_seqlens");
    const auto lengths = span_of<std::int32_t>(context_lens, "context_lens");
    TORCH_CHECK_VALUE(q.size(1) == heads_ && q.size(2) == cache_.layout().head_dim,
                      "q must be [tokens, heads, head_dim]");
    TORCH_CHECK_VALUE(ends.size() == lengths.size() + 1 && ends.back() == q.size(0) &&
                          block_table.size(0) == context_lens.size(0),
                      "cu_seqlens, context_lens, block_table and q do not fit");
    for (const std::int32_t block : blocks)
      TORCH_CHECK_VALUE(block < cache_.num_blocks(), "block ", block);
    at::Tensor out = at::empty_like(q);
    const std::ptrdiff_t width = q.size(1) * q.size(2);
    attention_.plan(cache_.layout(), shared_pool().size(), ends, lengths, blocks.data(),
                    static_cast<int>(block_table.size(1)));
    attention_.run(shared_pool(), cache_, 0, window, from.data(), width,
                   out.mutable_data_ptr<float>(), width);
    return out;
  }

  std::size_t kv_bytes() const { return cache_.bytes(); }

 private:
  int heads_;
  PagedAttention attention_;
  KvCache cache_;
};

inline void bind_attention(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<AttentionOp>(m, "PagedAttention",
                          R"(One layer's paged KV cache and causal attention to it.

The decoder's attention by itself, for tests and measurements. kv_dtype: float32, bfloat16 or int8.)")
      .def(py::init<int, int, int, int, int, const std::string&, const std::string&>(),
           py::arg("heads"), py::arg("kv_heads"), py::arg("head_dim"), py::arg("num_blocks"),
           py::arg("block_size") = 16, py::arg("kv_dtype") = "float32", py::arg("isa") = "")
      .def("write", &AttentionOp::write, no_gil, py::arg("slots"), py::arg("keys"),
           py::arg("values"),
           "Stores float32 keys and values [T, kv_heads, head_dim] in the slots (int32 [T]).")
      .def("attend", &AttentionOp::attend, no_gil, py::arg("q"), py::arg("cu_seqlens"),
           py::arg("context_lens"), py::arg("block_table"), py::arg("window") = 0,
           R"(Outputs [T, heads, head_dim] of scaled queries q of that shape, float32.

int32 inputs: cu_seqlens [S + 1], context_lens [S], block_table [S, B]. A sequence's tokens are its last.
window 0: all earlier keys are seen.)")
      .def_property_readonly("kv_bytes", &AttentionOp::kv_bytes);
}

}  // namespace pyserve
