// The block pool and the selection as Python sees them; included by bindings.cpp.
#pragma once

#include <torch/extension.h>

#include "profile/range.h"
#include "schedule/block_pool.h"
#include "schedule/select.h"
#include "tensors.h"

namespace pyserve {

namespace py = pybind11;

inline void bind_pool(py::module_& m) {
  py::class_<PoolStatistics>(m, "PoolStatistics",
                             "A snapshot of a BlockPool: free + cached + owned == num_blocks.")
      .def_readonly("num_blocks", &PoolStatistics::num_blocks)
      .def_readonly("free", &PoolStatistics::free, "Blocks that hold nothing.")
      .def_readonly("cached", &PoolStatistics::cached,
                    "Blocks that no row owns and a known prefix can bring back.")
      .def_readonly("owned", &PoolStatistics::owned, "Blocks in at least one row's table.")
      .def_readonly("prefix_queries", &PoolStatistics::prefix_queries, "Tokens looked up by match.")
      .def_readonly("prefix_hits", &PoolStatistics::prefix_hits, "Tokens that match found.")
      .def_readonly("evictions", &PoolStatistics::evictions,
                    "Cached blocks that were reused for something else.")
      .def_readonly("rows", &PoolStatistics::rows, "Live rows.");

  py::class_<BlockPool>(m, "BlockPool", R"(Accounting of the paged KV cache.

A sequence is a *row*: a small int, used again after release. A row has tokens, of which the first `computed`
have their KV in the row's blocks, in order. Full blocks are shared by prefix: salt and all tokens up to the
block's end are the same, compared exactly. Released blocks keep their prefix until they are reused, least
recently released first. Belongs to one thread. Wrong calls raise ValueError and change nothing.)")
      .def(py::init<int64_t, int64_t, bool>(), py::arg("num_blocks"), py::arg("block_size"),
           py::arg("prefix_cache"))
      .def(
          "add",
          [](BlockPool& pool, const at::Tensor& tokens, int64_t prompt_len, uint64_t salt,
             int64_t tenant) { return pool.add(ints(tokens, "tokens"), prompt_len, salt, tenant); },
          py::arg("tokens"), py::arg("prompt_len"), py::arg("salt"), py::arg("tenant"),
          "A new row of int32 `tokens` [P], the first `prompt_len` of them prompt; it owns no "
          "blocks yet.\n\n"
          "Rows of different `salt` (64 bits) never share blocks. `tenant` is any int.")
      .def(
          "append",
          [](BlockPool& pool, const at::Tensor& rows, const at::Tensor& tokens) {
            pool.append(ints(rows, "rows"), ints(tokens, "tokens"));
          },
          py::arg("rows"), py::arg("tokens"), "One more token for each of `rows`, int32 [R] both.")
      .def(
          "advance",
          [](BlockPool& pool, const at::Tensor& rows, const at::Tensor& takes) {
            pool.advance(ints(rows, "rows"), ints(takes, "takes"));
          },
          py::arg("rows"), py::arg("takes"),
          "`takes` more tokens of each of `rows` (distinct; int32 [R] both) have their KV now.\n\n"
          "Blocks that became full can be found by their prefix from here on. Call it when the KV "
          "is written.")
      .def("match", &BlockPool::match, py::arg("row"),
           "Gives a row that owns no blocks those of its longest known prefix; returns how many "
           "tokens.\n\n"
           "A multiple of block_size and at most length - 1: the last token's logits are wanted.")
      .def("fork", &BlockPool::fork, py::arg("parent"), py::arg("child"),
           "Shares the parent's full computed blocks of the common prompt with `child`, which owns "
           "none.\n\n"
           "Works without a prefix cache too. Returns the child's computed tokens, at most length "
           "- 1.")
      .def(
          "reserve", &BlockPool::reserve, py::arg("row"), py::arg("tokens"),
          "Grows the row's table to hold `tokens` tokens; False, and nothing done, if blocks lack.")
      .def(
          "reserve_all",
          [](BlockPool& pool, const at::Tensor& rows) {
            const profile::Range range(profile::Op::select);  // it stands for select there
            return pool.reserve_all(ints(rows, "rows"));
          },
          py::arg("rows"),
          "Grows the tables of `rows` (distinct; int32 [R]) to hold all their known tokens; False, "
          "and nothing done, if blocks lack.")
      .def(
          "trim", &BlockPool::trim, py::arg("row"), py::arg("keep_blocks"),
          "Gives back all but the first `keep_blocks` blocks; `computed` falls to what those hold.")
      .def("release", &BlockPool::release, py::arg("row"),
           "Ends the row and gives back its blocks. A second time raises ValueError.")
      .def("length", &BlockPool::length, py::arg("row"), "Tokens of the row, prompt and output.")
      .def("computed", &BlockPool::computed, py::arg("row"),
           "Tokens whose KV is in the row's blocks.")
      .def("prompt_len", &BlockPool::prompt_len, py::arg("row"))
      .def(
          "blocks",
          [](const BlockPool& pool, int32_t row) {
            const auto blocks = pool.blocks(row);
            return std::vector<int32_t>(blocks.begin(), blocks.end());
          },
          py::arg("row"), "The row's block table, in order.")
      .def(
          "tokens", [](const BlockPool& pool, int32_t row) { return int_tensor(pool.tokens(row)); },
          py::arg("row"), "The row's tokens, int32 [length], a copy.")
      .def_property_readonly("num_blocks", &BlockPool::num_blocks)
      .def_property_readonly("block_size", &BlockPool::block_size)
      .def_property_readonly("available_blocks", &BlockPool::available,
                             "Blocks that no row owns: free + cached.")
      .def(
          "tenant_blocks", &BlockPool::tenant_blocks, py::arg("tenant"),
          "Entries in the block tables of the tenant's rows (a block two rows share counts twice).")
      .def("statistics", &BlockPool::statistics, "A PoolStatistics snapshot.")
      .def("check", &BlockPool::check, py::call_guard<py::gil_scoped_release>(),
           "Counts everything again; raises RuntimeError naming the first invariant that is "
           "broken.");
}

inline std::vector<std::pair<int64_t, int64_t>> pairs(const std::vector<Selection::Cut>& cuts) {
  std::vector<std::pair<int64_t, int64_t>> result;
  for (const auto& cut : cuts) result.emplace_back(cut.candidate, cut.kept_blocks);
  return result;
}

inline void bind_select(py::module_& m) {
  py::class_<Limits>(m, "Limits", "What one step may hold.")
      .def(py::init<int64_t, int64_t, int64_t>(), py::arg("token_budget"),
           py::arg("request_budget"), py::arg("prefill_budget") = -1)
      .def_readonly("token_budget", &Limits::token_budget, "Tokens.")
      .def_readonly("request_budget", &Limits::request_budget, "Rows.")
      .def_readonly("prefill_budget", &Limits::prefill_budget,
                    "Prefill tokens; -1: no limit of their own.");

  py::class_<Selection>(m, "Selection",
                        "Who advances in a step. Candidates are named by their index.")
      .def_property_readonly(
          "take", [](const Selection& s) { return int_tensor(s.take); },
          "int32 [N]: how many tokens each candidate advances by.")
      .def_property_readonly(
          "preempted", [](const Selection& s) { return pairs(s.preempted); },
          "[(candidate, kept blocks)]: running ones that must go back to waiting.")
      .def_property_readonly(
          "trimmed", [](const Selection& s) { return pairs(s.trimmed); },
          "[(candidate, kept blocks)]: waiting ones that lost blocks they still held.")
      .def_readonly("used_tokens", &Selection::used_tokens)
      .def_readonly("used_requests", &Selection::used_requests);

  m.def(
      "select",
      [](BlockPool& pool, const at::Tensor& rows, const at::Tensor& want, const at::Tensor& running,
         const at::Tensor& need_free, const Limits& limits) {
        const Candidates candidates{ints(rows, "rows"), ints(want, "want"),
                                    span_of<uint8_t>(running, "running"),
                                    ints(need_free, "need_free")};
        const profile::Range range(profile::Op::select);
        return select(pool, candidates, limits);
      },
      py::arg("pool"), py::arg("rows"), py::arg("want"), py::arg("running"), py::arg("need_free"),
      py::arg("limits"),
      R"(Chooses what the next step computes, and grows the block tables for it.

Candidates, best rank first and the running before the waiting: `rows` int32 [N], `want` int32 [N] (most
tokens to take), `running` uint8 [N], `need_free` int32 [N] (blocks that must be available to admit a
waiting one). Every row that owns blocks must be among them.

First every running row that decodes (want 1, all but its last token computed), then running prefill chunks,
then waiting ones in order until one does not fit, and those only if nobody lost blocks in this step. A running row
that lacks blocks takes tail blocks, no more than it needs, from the lowest ranks; who loses some does not
advance; who finds none below is preempted with all its blocks kept. A chunk shrinks to what there is room for.
Where nothing runs, the first waiting row does the same. So a row that fits the pool by itself advances.)");
}

inline void bind_schedule(py::module_& m) {
  bind_pool(m);
  bind_select(m);
}

}  // namespace pyserve
