// Attention of one packed step, shared out to threads.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "kernels/buffer.h"
#include "kernels/thread_pool.h"
#include "model/kv_cache.h"

namespace pyserve {

// Plans once a step, runs once a layer. Bits depend neither on the number of threads nor on how the
// work is cut. Not for two threads at once.
class PagedAttention {
 public:
  PagedAttention(const Kernels& kernels, int heads);

  // cu_seqlens [S + 1], context_lens [S] after the step, block_table [S, table_width]; the last
  // must outlive the runs.
  void plan(const KvLayout& layout, int threads, std::span<const std::int32_t> cu_seqlens,
            std::span<const std::int32_t> context_lens, const std::int32_t* block_table,
            int table_width);
  // q and out: [T, heads * head_dim] of row strides ldq and ldo; q rotated and scaled. window 0:
  // full.
  void run(ThreadPool& pool, const KvCache& cache, int layer, int window, const float* q,
           std::ptrdiff_t ldq, float* out, std::ptrdiff_t ldo);

 private:
  // A tile, whole or one span of it.
  struct Item {
    AttentionTile tile;
    std::int64_t cost;  // query tokens times keys
    int span = -1;      // -1: all of them
    int split = -1;     // index into splits_
  };
  // A tile whose spans are computed apart: whoever is the last of them merges.
  struct Split {
    int spans;
    std::size_t partials;  // first float in partials_
    std::size_t stride;    // floats of a span
  };

  void split(const KvLayout& layout, int threads);
  void compute(const AttentionArgs& args, const Item& item, const Item* next, float* scratch);

  const Kernels& kernels_;
  int heads_;
  std::vector<Item> items_;
  std::vector<Split> splits_;
  std::vector<std::atomic<int>> left_;  // spans of a split not computed yet
  Buffer partials_;
  std::vector<Buffer> scratch_;  // one a thread
};

}  // namespace pyserve
