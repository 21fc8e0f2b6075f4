// The Decoder as Python sees it; included by bindings.cpp.
#pragma once

#include <torch/extension.h>

#include <algorithm>
#include <array>
#include <optional>

#include "model/decoder.h"
#include "tensors.h"

namespace pyserve {

namespace py = pybind11;

template <typename T>
T field(const py::dict& fields, const char* name) {
  if (!fields.contains(name)) throw py::key_error(std::string("config lacks ") + name);
  return fields[name].cast<T>();
}

template <typename T>
T choice(const py::dict& fields, const char* name, std::initializer_list<const char*> names) {
  const auto value = field<std::string>(fields, name);
  int i = 0;
  for (const char* candidate : names) {
    if (value == candidate) return static_cast<T>(i);
    ++i;
  }
  throw std::invalid_argument(std::string(name) + " is '" + value + "'");
}

inline DecoderConfig decoder_config(const py::dict& d) {
  DecoderConfig c = {
      .vocab_size = field<int>(d, "vocab_size"),
      .hidden_size = field<int>(d, "hidden_size"),
      .num_layers = field<int>(d, "num_layers"),
      .num_heads = field<int>(d, "num_heads"),
      .num_kv_heads = field<int>(d, "num_kv_heads"),
      .head_dim = field<int>(d, "head_dim"),
      .intermediate_size = field<int>(d, "intermediate_size"),
      .context_length = field<int>(d, "context_length"),
      .norm = choice<Norm>(d, "norm", {"rms", "layer"}),
      .norm_eps = field<float>(d, "norm_eps"),
      .activation = choice<Activation>(d, "activation", {"silu", "gelu_tanh"}),
      .gated_mlp = field<bool>(d, "gated_mlp"),
      .qk_norm = field<bool>(d, "qk_norm"),
      .post_norms = field<bool>(d, "post_norms"),
      .attention_scale = field<float>(d, "attention_scale"),
      .embedding_scale = field<float>(d, "embedding_scale"),
      .layer_window = field<std::vector<int>>(d, "layer_window"),
      .layer_rope = field<std::vector<int>>(d, "layer_rope"),
      .ropes = {},
      .learned_positions = field<bool>(d, "learned_positions"),
      .tie_embeddings = field<bool>(d, "tie_embeddings"),
  };
  for (const py::handle& rope : field<py::sequence>(d, "ropes")) {
    const auto fields = rope.cast<py::dict>();
    c.ropes.push_back(
        {field<std::vector<float>>(fields, "inv_freq"), field<float>(fields, "attention_factor")});
  }
  return c;
}

inline DType dtype_named(const std::string& name) {
  TORCH_CHECK_VALUE(name == "float32" || name == "bfloat16",
                    "dtype must be float32 or bfloat16, got ", name);
  return name == "float32" ? DType::float32 : DType::bfloat16;
}

inline KvType kv_type_named(const std::string& name) {
  constexpr std::array names = {"float32", "bfloat16", "int8"};
  const auto at = std::find(names.begin(), names.end(), name);
  TORCH_CHECK_VALUE(at != names.end(), "KV dtype must be float32, bfloat16 or int8, got ", name);
  return static_cast<KvType>(at - names.begin());
}

inline void allocate_kv(Decoder& decoder, int num_blocks, int block_size, const std::string& dtype,
                        bool prefault) {
  decoder.allocate_kv(num_blocks, block_size, kv_type_named(dtype), prefault);
}

inline std::unique_ptr<Decoder> make_decoder(const py::dict& config, const std::string& dtype,
                                             const std::string& isa) {
  return std::make_unique<Decoder>(decoder_config(config), dtype_named(dtype), kernels_for(isa));
}

inline void load_weight(Decoder& decoder, const std::string& name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(at::isFloatingType(tensor.scalar_type()), name, " is not floating point");
  const at::Tensor data = tensor.to(at::kCPU, at::kFloat).contiguous();
  decoder.load(name, {data.sizes().data(), data.sizes().size()}, data.const_data_ptr<float>());
}

// blocks uint8 [rows, bytes of a row's blocks]; the shape in elements.
struct StoredMatrix {
  const StoredFormat* format;
  at::Tensor bytes;
  std::array<std::int64_t, 2> shape;
};

inline StoredMatrix stored_matrix(const std::string& type, const at::Tensor& blocks) {
  const StoredFormat* format = stored_format_named(type);
  TORCH_CHECK_VALUE(format != nullptr, "no kernels for weights in ", type);
  TORCH_CHECK_VALUE(blocks.dim() == 2 && blocks.scalar_type() == at::kByte,
                    "blocks must be uint8 [rows, bytes]");
  TORCH_CHECK_VALUE(blocks.size(1) % format->bytes == 0, "rows are no whole number of ", type,
                    " blocks");
  return {format,
          blocks.contiguous(),
          {blocks.size(0), blocks.size(1) / format->bytes * format->elements}};
}

inline void load_blocks(Decoder& decoder, const std::string& name, const std::string& type,
                        const at::Tensor& blocks) {
  const StoredMatrix stored = stored_matrix(type, blocks);
  decoder.load(name, stored.shape, *stored.format, stored.bytes.const_data_ptr<std::uint8_t>());
}

inline std::pair<at::Tensor, at::Tensor> decoder_forward(
    Decoder& decoder, const at::Tensor& input_ids, const at::Tensor& positions,
    const at::Tensor& cu_seqlens, const at::Tensor& context_lens, const at::Tensor& slot_mapping,
    const at::Tensor& block_table, const at::Tensor& logit_rows, const at::Tensor& hidden_rows) {
  TORCH_CHECK_VALUE(block_table.dim() == 2, "block_table must have two dimensions");
  // A view of a wider buffer has gaps between its rows.
  const at::Tensor table = block_table.contiguous();
  const StepInput step = {.input_ids = span_of<std::int32_t>(input_ids, "input_ids"),
                          .positions = span_of<std::int32_t>(positions, "positions"),
                          .cu_seqlens = span_of<std::int32_t>(cu_seqlens, "cu_seqlens"),
                          .context_lens = span_of<std::int32_t>(context_lens, "context_lens"),
                          .slots = span_of<std::int32_t>(slot_mapping, "slot_mapping"),
                          .block_table = span_of<std::int32_t>(table, "block_table", 2),
                          .table_width = static_cast<int>(table.size(1)),
                          .logit_rows = span_of<std::int32_t>(logit_rows, "logit_rows"),
                          .hidden_rows = span_of<std::int32_t>(hidden_rows, "hidden_rows")};
  const auto rows = logit_rows.numel();
  const std::shared_ptr<Buffer> room = decoder.logits_room(static_cast<int>(rows));
  const at::Tensor logits = at::from_blob(
      room->as<float>(), {rows, decoder.config().vocab_size}, [room](void*) {},
      at::TensorOptions(at::kFloat));
  at::Tensor hidden = at::empty({hidden_rows.numel(), decoder.config().hidden_size}, at::kFloat);
  decoder.forward(step, logits.mutable_data_ptr<float>(), hidden.mutable_data_ptr<float>());
  return {logits, hidden};
}

inline std::unique_ptr<Projection> make_linear(const at::Tensor& weight, const std::string& dtype,
                                               const std::string& isa) {
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight must be [out, in]");
  const at::Tensor data = weight.to(at::kCPU, at::kFloat).contiguous();
  const int out = static_cast<int>(data.size(0)), in = static_cast<int>(data.size(1));
  auto linear = std::make_unique<Projection>(kernels_for(isa), dtype_named(dtype), out, in);
  linear->pack(shared_pool(), data.const_data_ptr<float>(), out, 0);
  return linear;
}

inline std::unique_ptr<Projection> make_quantized_linear(const std::string& type,
                                                         const at::Tensor& blocks,
                                                         const std::string& isa) {
  const StoredMatrix stored = stored_matrix(type, blocks);
  const int out = static_cast<int>(stored.shape[0]), in = static_cast<int>(stored.shape[1]);
  auto linear = std::make_unique<Projection>(kernels_for(isa), DType::float32, out, in);
  linear->pack(shared_pool(), *stored.format, stored.bytes.const_data_ptr<std::uint8_t>(), out, 0);
  return linear;
}

inline at::Tensor apply_linear(const Projection& linear, const at::Tensor& x,
                               const std::optional<at::Tensor>& out) {
  const auto from = span_of<float>(x, "x", 2);
  TORCH_CHECK_VALUE(x.size(1) == linear.in(), "x must be [rows, ", linear.in(), "]");
  at::Tensor y = out ? *out : at::empty({x.size(0), linear.out()}, at::kFloat);
  span_of<float>(y, "out", 2);
  TORCH_CHECK_VALUE(y.size(0) == x.size(0) && y.size(1) == linear.out(), "out must be [", x.size(0),
                    ", ", linear.out(), "]");
  const int rows = static_cast<int>(x.size(0));
  static thread_local NarrowRows narrow;  // kept: new pages would cost more than the product
  narrow.reserve(rows, linear.in());
  linear.prepare(shared_pool(), from.data(), linear.in(), rows, narrow);
  const ProjectionInput input = {.floats = from.data(), .stride = linear.in(), .narrow = &narrow};
  linear.apply(shared_pool(), input, rows, y.mutable_data_ptr<float>(), linear.out());
  return y;
}

inline at::Tensor read_linear_row(const Projection& linear, std::int64_t row) {
  TORCH_CHECK_VALUE(0 <= row && row < linear.out(), "row ", row, " of ", linear.out());
  at::Tensor y = at::empty({linear.in()}, at::kFloat);
  linear.read_row(static_cast<int>(row), y.mutable_data_ptr<float>());
  return y;
}

inline py::dict stored_format_table() {
  constexpr const char* kKept[] = {"Q8_0", "Q4_0", "Q4_1", "Q8_1"};
  py::dict table;
  for (const StoredFormat& format : stored_formats()) {
    const QuantPanel panel(format.packed_as);
    table[py::str(format.name)] = py::make_tuple(
        kKept[static_cast<int>(format.packed_as)],
        (panel.scale_bytes + panel.integer_bytes) / kQuantColumns, format.elements, format.bytes);
  }
  return table;
}

inline void bind_model(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("set_num_threads", &set_num_threads, no_gil, py::arg("threads"),
        "Threads of every forward pass, the calling one included (1 to 1024). Not while one runs.");
  m.def(
      "get_num_threads", [] { return shared_pool().size(); }, no_gil,
      "Threads of a forward pass: PYSERVE_THREADS, or one for each processor, unless set.");
  m.def(
      "supported_isas",
      [] {
        std::vector<std::string> names;
        if (isa_supported(Isa::portable)) names.push_back("portable");
        if (isa_supported(Isa::avx2)) names.push_back("avx2");
        if (isa_supported(Isa::avx512)) names.push_back("avx512");
        if (isa_supported(Isa::amx)) names.push_back("amx");
        return names;
      },
      "Instruction sets that this build and this processor have, slowest first.");
  m.def(
      "stored_formats", &stored_format_table,
      R"(Types of weights that can be kept quantised, by GGUF's name, with bytes and elements of a block.

Of each (kept as, bytes of 32 elements then, elements, bytes): F32, F16 and BF16 are rounded to 8 bits.)");
  m.def("has_bfloat16", &has_bfloat16, "Whether the processor has bfloat16 dot products (x86).");
  py::class_<Projection>(m, "Linear",
                         R"(A linear layer's weight [out, in], packed for one instruction set.

The decoder's matrix product by itself, for tests and measurements.)")
      .def(py::init(&make_linear), no_gil, py::arg("weight"), py::arg("dtype") = "float32",
           py::arg("isa") = "")
      .def_static("from_blocks", &make_quantized_linear, no_gil, py::arg("kind"), py::arg("blocks"),
                  py::arg("isa") = "",
                  "A quantised weight: uint8 [out, bytes] in a type of stored_formats().")
      .def("apply", &apply_linear, no_gil, py::arg("x"), py::arg("out") = std::nullopt,
           "x W^T for float32 x [rows, in], float32 [rows, out], written to `out` where it is "
           "given; "
           "a row's bits depend on it alone.")
      .def("read_row", &read_linear_row, no_gil, py::arg("row"),
           "One row of the weight as float32 [in].")
      .def_property_readonly("bytes", &Projection::bytes);
  py::class_<Decoder>(m, "Decoder",
                      R"(A decoder-only transformer on the CPU, with its paged KV cache.

config: DecoderConfig.as_dict(). dtype ("float32" or "bfloat16") of linear weights; arithmetic is
float32. isa forces an instruction set, "" takes PYSERVE_ISA or the best. A row of logits depends on its own
sequence only: the same bits whatever else is in the step, however the prompt was cut into steps and
wherever its blocks lie. One thread at a time.)")
      .def(py::init(&make_decoder), py::arg("config"), py::arg("dtype") = "float32",
           py::arg("isa") = "")
      .def("load", &load_weight, no_gil, py::arg("name"), py::arg("tensor"),
           "Copies one weight in, by canonical name (pyserve.models.config). ValueError: wrong "
           "shape.")
      .def("load_blocks", &load_blocks, no_gil, py::arg("name"), py::arg("kind"), py::arg("blocks"),
           "The same for a matrix, uint8 [rows, bytes of a row] in a type of stored_formats(), "
           "which is "
           "kept quantised: products quantise their other side to 8 bits by token and 32 depths.")
      .def("seal", &Decoder::seal, "Ends loading. ValueError lists missing and unexpected names.")
      .def(
          "allocate_kv", &allocate_kv, no_gil, py::arg("num_blocks"), py::arg("block_size"),
          py::arg("dtype") = "float32", py::arg("prefault") = false,
          R"(Replaces the KV storage by an empty one of float32, bfloat16 or int8. MemoryError: no room.

int8 is by token and kv head, keys and values apart, with a float32 scale each. The system hands the memory
out as blocks are first written; or, with prefault, in idle time from now on.)")
      .def("await_kv", &Decoder::await_kv, no_gil,
           "Waits until all memory to be prefaulted is there.")
      .def("forward", &decoder_forward, no_gil, py::arg("input_ids"), py::arg("positions"),
           py::arg("cu_seqlens"), py::arg("context_lens"), py::arg("slot_mapping"),
           py::arg("block_table"), py::arg("logit_rows"), py::arg("hidden_rows"),
           R"(Runs one step; all inputs int32, shapes as in pyserve.backends.base.PackedStep.

Returns (logits float32 [R, vocab_size], hidden float32 [E, hidden_size] after the final norm). ValueError:
an index is out of range; nothing has been written then.)")
      .def_property_readonly("isa", &Decoder::isa, "Instruction set in use.")
      .def_property_readonly("weight_bytes", &Decoder::weight_bytes)
      .def_property_readonly("kv_bytes", &Decoder::kv_bytes);
}

}  // namespace pyserve
