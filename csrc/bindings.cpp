// Every op and class that the extension offers, with its schema and docstring: one function a room,
// called at the bottom, the larger ones in their rooms' bind_*.h. Tensors end here: what is called
// takes spans.
//
// Calls that last release the interpreter. Short ones on the engine's thread keep it: to release it
// would let the event loop in, and the next forward pass would wait for that instead of a few
// microseconds.
#include <sys/socket.h>
#include <torch/extension.h>

#include <cerrno>
#include <system_error>

#include "batch/ops.h"
#include "batch/step_buffers.h"
#include "device/bind_wishes.h"
#include "device/ops.h"
#include "kernels/sample.h"
#include "model/bind_attention.h"
#include "model/bind_decoder.h"
#include "profile/bind_profile.h"
#include "schedule/bind_schedule.h"
#include "tensors.h"

namespace py = pybind11;

namespace pyserve {
namespace {

using at::Tensor;

// --- batch: StepBuffers, pack ------------------------------------------------------------------

void bind_batch(py::module_& m) {
  py::class_<PackedStep>(
      m, "PackedStep",
      "One step's inputs, int32: T new tokens of S sequences, R of which need logits."
      " Views of its StepBuffers, which the next pack into them overwrites.")
      .def_readonly("input_ids", &PackedStep::input_ids, "[T] token ids, sequence after sequence.")
      .def_readonly("positions", &PackedStep::positions, "[T] each token's position, from 0.")
      .def_readonly("cu_seqlens", &PackedStep::cu_seqlens,
                    "[S + 1] sequence s has tokens [cu_seqlens[s], cu_seqlens[s + 1]).")
      .def_readonly("context_lens", &PackedStep::context_lens, "[S] KV length after the step.")
      .def_readonly("slot_mapping", &PackedStep::slot_mapping,
                    "[T] where each token's KV goes: block * block_size + offset.")
      .def_readonly("block_table", &PackedStep::block_table,
                    "[S, B] each sequence's blocks in order, padded with 0.")
      .def_readonly("sample_seq", &PackedStep::sample_seq,
                    "[R] the sequences that reach their last known token, and so need logits.")
      .def_readonly("logit_rows", &PackedStep::logit_rows,
                    "[R] index of their last tokens into T.");

  py::class_<StepBuffers>(m, "StepBuffers", "What pack writes into, allocated once.")
      .def(py::init<int64_t, int64_t, int64_t>(), py::arg("max_tokens"), py::arg("max_seqs"),
           py::arg("max_blocks"), "`max_blocks` is the most that one sequence's table may have.");

  m.def(
      "pack",
      [](const BlockPool& pool, const Tensor& rows, const Tensor& takes, const StepBuffers& out) {
        const profile::Range range(profile::Op::pack);
        return out.views(pack(pool, ints(rows, "rows"), ints(takes, "takes"), out.arrays()));
      },
      py::arg("pool"), py::arg("rows"), py::arg("takes"), py::arg("buffers"),
      "The step in which each of `rows` advances by `takes` > 0 tokens (int32 [S] both).\n\n"
      "The rows' tables must have room already (select sees to that). Raises ValueError where that "
      "is not\n"
      "so, or where the step does not fit the buffers.");
}

// --- sampling: SamplerState, sample ------------------------------------------------------------

void bind_sampler_state(py::module_& m) {
  py::class_<SamplerState>(m, "SamplerState", "How each row of a BlockPool wants its tokens drawn.")
      .def(py::init<>())
      .def(
          "set",
          [](SamplerState& state, int32_t row, float temperature, float top_p, int64_t top_k,
             float min_p, float frequency_penalty, float presence_penalty, float repetition_penalty,
             uint64_t seed, int64_t min_tokens, std::vector<int32_t> banned_until_min,
             std::vector<std::pair<int32_t, float>> logit_bias, int64_t logprobs) {
            state.set(row, {.temperature = temperature,
                            .top_p = top_p,
                            .top_k = top_k,
                            .min_p = min_p,
                            .frequency_penalty = frequency_penalty,
                            .presence_penalty = presence_penalty,
                            .repetition_penalty = repetition_penalty,
                            .seed = seed,
                            .min_tokens = min_tokens,
                            .banned_until_min = std::move(banned_until_min),
                            .logit_bias = std::move(logit_bias),
                            .logprobs = logprobs});
          },
          py::arg("row"), py::kw_only(), py::arg("temperature") = 1.0, py::arg("top_p") = 1.0,
          py::arg("top_k") = 0, py::arg("min_p") = 0.0, py::arg("frequency_penalty") = 0.0,
          py::arg("presence_penalty") = 0.0, py::arg("repetition_penalty") = 1.0,
          py::arg("seed") = 0, py::arg("min_tokens") = 0,
          py::arg("banned_until_min") = std::vector<int32_t>{},
          py::arg("logit_bias") = std::vector<std::pair<int32_t, float>>{},
          py::arg("logprobs") = -1,
          R"(Sets all of a row's parameters; those left out are off.

Temperature 0 (below 1e-5) is greedy, top_k 0 off, `seed` 64 bits, `logit_bias` [(token, value)], `logprobs` how many
top log-probabilities beside the drawn token's (-1: none at all). Until the row has `min_tokens` output
tokens, none of `banned_until_min` is drawn. Frequency and presence penalties count output tokens, the
repetition penalty prompt and output. ValueError where a value is out of range.)")
      .def("clear", &SamplerState::clear, py::arg("row"), "Forgets a row; nothing if none is set.");
}

using Sampled = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Sampled sample_rows(const Tensor& logits, const BlockPool& pool, const SamplerState& state,
                    const Tensor& rows, const py::object& error_type) {
  const auto row_ids = ints(rows, "rows");
  const auto count = int64_t(row_ids.size());
  const auto values = span_of<float>(logits, "logits", 2);
  TORCH_CHECK_VALUE(logits.size(0) == count, "logits must have one row for each of rows");
  const int64_t width = top_width(state, row_ids);
  const Sampled out{at::empty({count}, at::kInt), at::empty({count}, at::kFloat),
                    at::empty({count, width}, at::kInt), at::empty({count, width}, at::kFloat)};
  const SampleOutput spans{span_of<int32_t>(std::get<0>(out), "tokens"),
                           span_of<float>(std::get<1>(out), "logprobs"),
                           span_of<int32_t>(std::get<2>(out), "top_ids", 2),
                           span_of<float>(std::get<3>(out), "top_logprobs", 2), width};
  std::vector<SampleFailure> failures;
  {
    const py::gil_scoped_release no_gil;
    const profile::Range range(profile::Op::sample, [&] {
      return profile::Cost{.memory_bytes = double(values.size_bytes()),
                           .float_operations = double(values.size())};
    });
    failures = sample(values, pool, state, row_ids, spans);
  }
  if (failures.empty()) return out;
  py::dict failed;
  std::string message = "rows that cannot be sampled:";
  for (const auto& [index, reason] : failures) {
    failed[py::int_(index)] = reason;
    message += " " + std::to_string(index) + " (" + reason + ")";
  }
  const py::object error = error_type(message);
  error.attr("failed") = failed;
  PyErr_SetObject(error_type.ptr(), error.ptr());
  throw py::error_already_set();
}

void bind_sampling(py::module_& m) {
  bind_sampler_state(m);
  bind_wishes(m);
  const py::object error = py::exception<std::runtime_error>(m, "SampleError", PyExc_ValueError);
  error.attr("__doc__") =
      "Rows that cannot be sampled. `failed`: {index into rows: why}. The others were not at fault:"
      " sampling them again without these gives what they would have got.";
  m.def(
      "sample",
      [error](const Tensor& logits, const BlockPool& pool, const SamplerState& state,
              const Tensor& rows) { return sample_rows(logits, pool, state, rows, error); },
      py::arg("logits"), py::arg("pool"), py::arg("state"), py::arg("rows"),
      R"(Draws one token for each of `rows` (int32 [R]) from its `logits` (float32 [R, V]).

Returns (tokens int32 [R], logprobs float32 [R], top_ids int32 [R, K], top_logprobs float32 [R, K]), K the most
that any row asks for. Log-probabilities are of the logits as given; NaN for rows that want none. Beyond
what a row asks for, top_ids is -1 and top_logprobs -infinity. The draw is a function of the row's logits,
tokens, parameters and seed, and of its length: of nothing else in the batch. Raises SampleError.)");
}

// --- engine: wake -------------------------------------------------------------------------------

void bind_engine(py::module_& m) {
  m.def(
      "wake",
      [](int socket) {
        const char byte = 0;
        if (::send(socket, &byte, 1, 0) >= 0) return;
        if (errno != EAGAIN && errno != EWOULDBLOCK) {
          throw std::system_error(errno, std::generic_category(), "wake");
        }
      },
      py::arg("socket"),
      "Sends a byte to a non-blocking socket without letting go of the interpreter.\n\n"
      "Whoever it wakes can run as soon as the caller does let go. A full socket is no error: "
      "its reader has been woken already.");
}

}  // namespace
}  // namespace pyserve

TORCH_LIBRARY(pyserve, m) {
  // Sequences that lie one after the other in `flat` [T, ...] as the rows of [S, L, ...], `value`
  // elsewhere; L is the longest length, or max_len. cu_seqlens int32 [S + 1] from 0 to T. Any
  // dtype.
  m.def("pad(Tensor flat, Tensor cu_seqlens, Scalar value=0, *, int? max_len=None) -> Tensor");
  // The way back: [S, L, ...] to [T, ...]. num_tokens, where known, spares CUDA a wait.
  m.def("unpad(Tensor rect, Tensor cu_seqlens, *, int? num_tokens=None) -> Tensor");
  // positions and slot_mapping (int32 [T]) of a step from cu_seqlens [S + 1], context_lens [S] and
  // block_table [S, B]: what pack computes, where those three lie.
  m.def(
      "locate(Tensor cu_seqlens, Tensor context_lens, Tensor block_table, int block_size,"
      " int num_tokens) -> (Tensor positions, Tensor slots)");
  // RMSNorm of x [T, N], LayerNorm where there is a bias; addend is added to x, in place, first.
  // float32 or bfloat16 each, weight and bias float32 [N]; the result is `dtype`.
  m.def(
      "normalize(Tensor(a!) x, Tensor? addend, Tensor weight, Tensor? bias, float eps,"
      " ScalarType dtype) -> Tensor");
  // Query, key and value heads of qkv [T, (H + 2 K) D]: queries and keys are RMS-normed (by q_norm,
  // k_norm float32 [D], where given) and rotated (by rope float32 [positions, D], cosines then
  // sines) in place, keys and values written to slots int32 [T] of pages [blocks, block_size, K,
  // D].
  m.def(
      "place_heads(Tensor(a!) qkv, Tensor(b!) keys, Tensor(c!) values, Tensor positions,"
      " Tensor slots, Tensor? rope, Tensor? q_norm, Tensor? k_norm, float eps, int num_heads)"
      " -> ()");
  // silu (kind 0) or tanh gelu (1) of x [T, N]; gated: of the first half, times the second.
  m.def("activate(Tensor x, bool gated, int kind) -> Tensor");
  // One token for each row of logits float32 [R, V], as pack_wishes packs what rows wish for. The
  // logits are as they were afterwards. Like `sample`, with a status for each row (int32 [R]): 0
  // drawn, 1 logits not finite, 2 no finite logit.
  m.def(
      "draw(Tensor(a!) logits, Tensor(b!) wishes, int width) -> (Tensor tokens, Tensor logprobs,"
      " Tensor top_ids, Tensor top_logprobs, Tensor status)");
  // The next decode step's input_ids and context_lens, in place, from the tokens int32 [S] that the
  // last one drew.
  m.def("feed_forward(Tensor tokens, Tensor(a!) input_ids, Tensor(b!) context_lens) -> ()");
}

TORCH_LIBRARY_IMPL(pyserve, CPU, m) {
  m.impl("pad", pyserve::cpu::pad);
  m.impl("unpad", pyserve::cpu::unpad);
  m.impl("locate", pyserve::cpu::locate);
  m.impl("normalize", pyserve::cpu::normalize);
  m.impl("place_heads", pyserve::cpu::place_heads);
  m.impl("activate", pyserve::cpu::activate);
  m.impl("draw", pyserve::cpu::draw);
  m.impl("feed_forward", pyserve::cpu::feed_forward);
}

#ifdef PYSERVE_WITH_CUDA
TORCH_LIBRARY_IMPL(pyserve, CUDA, m) {
  m.impl("pad", pyserve::cuda::pad);
  m.impl("unpad", pyserve::cuda::unpad);
  m.impl("locate", pyserve::cuda::locate);
  m.impl("normalize", pyserve::cuda::normalize);
  m.impl("place_heads", pyserve::cuda::place_heads);
  m.impl("activate", pyserve::cuda::activate);
  m.impl("draw", pyserve::cuda::draw);
  m.impl("feed_forward", pyserve::cuda::feed_forward);
}
#endif

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "pyserve's compiled core: scheduling, batching, kernels and the decoder forward pass.";
  pyserve::bind_schedule(m);
  pyserve::bind_batch(m);
  pyserve::bind_sampling(m);
  pyserve::bind_model(m);
  pyserve::bind_attention(m);
  pyserve::bind_profile(m);
  pyserve::bind_engine(m);
}
