#include "model/paged_attention.h"

#include <algorithm>

namespace pyserve {

namespace {

// A tile that is more than this part of a thread's share of the step is split.
constexpr int kItemsPerThread = 4;

}  // namespace

PagedAttention::PagedAttention(const Kernels& kernels, int heads)
    : kernels_(kernels), heads_(heads) {}

void PagedAttention::plan(const KvLayout& layout, int threads,
                          std::span<const std::int32_t> cu_seqlens,
                          std::span<const std::int32_t> context_lens,
                          const std::int32_t* block_table, int table_width) {
  items_.clear();
  const int group = heads_ / layout.kv_heads;
  const int tile_tokens =
      std::max(1, kernels_.attention_rows[static_cast<int>(layout.type)] / group);
  for (std::size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
    const int begin = cu_seqlens[s], end = cu_seqlens[s + 1];
    const int cached = context_lens[s] - (end - begin);
    for (int token = begin; token < end; token += tile_tokens) {
      const int tokens = std::min(tile_tokens, end - token);
      const int position = cached + token - begin;
      for (int head = 0; head < layout.kv_heads; ++head)
        items_.push_back({.tile = {.first_token = token,
                                   .tokens = tokens,
                                   .first_position = position,
                                   .blocks = block_table + s * table_width,
                                   .kv_head = head},
                          .cost = std::int64_t{tokens} * (position + tokens)});
    }
  }
  split(layout, threads);
  // Threads take items one by one: with the largest first they finish together.
  std::ranges::stable_sort(items_, std::ranges::greater{}, &Item::cost);
  scratch_.resize(threads);
  const std::size_t floats = kernels_.attention_scratch_floats(layout, tile_tokens * group);
  for (Buffer& buffer : scratch_) buffer.reserve(floats * sizeof(float));
}

// Cuts tiles that would keep one thread busy while the others have run out of work.
void PagedAttention::split(const KvLayout& layout, int threads) {
  splits_.clear();
  std::int64_t total = 0;
  for (const Item& item : items_) total += item.cost;
  const std::int64_t largest = total / (std::int64_t{threads} * kItemsPerThread);
  const int keys = kernels_.attention_span_keys(layout), group = heads_ / layout.kv_heads;
  std::size_t floats = 0;
  for (std::size_t i = 0, whole = items_.size(); threads > 1 && i < whole; ++i) {
    const Item item = items_[i];
    const int end = item.tile.first_position + item.tile.tokens, spans = (end - 1) / keys + 1;
    if (item.cost <= largest || spans == 1) continue;
    const std::size_t stride = kernels_.attention_partial_floats(layout, item.tile.tokens * group);
    for (int span = 0; span < spans; ++span) {
      const Item part = {.tile = item.tile,
                         .cost = std::int64_t{item.tile.tokens} * std::min(keys, end - span * keys),
                         .span = span,
                         .split = static_cast<int>(splits_.size())};
      if (span == 0)
        items_[i] = part;
      else
        items_.push_back(part);
    }
    splits_.push_back({spans, floats, stride});
    floats += spans * stride;
  }
  partials_.reserve(floats * sizeof(float));
  if (left_.size() < splits_.size()) left_ = std::vector<std::atomic<int>>(splits_.size());
}

void PagedAttention::compute(const AttentionArgs& args, const Item& item, const Item* next,
                             float* scratch) {
  const int type = static_cast<int>(args.layout.type);
  if (item.split < 0) {
    AttentionTile tile = item.tile;
    if (next != nullptr && next->split < 0) tile.next = &next->tile;
    return kernels_.attention[type](args, tile, scratch);
  }
  const Split& split = splits_[item.split];
  float* partials = partials_.as<float>() + split.partials;
  kernels_.attention_span[type](args, item.tile, item.span, scratch,
                                partials + item.span * split.stride);
  if (left_[item.split].fetch_sub(1, std::memory_order_acq_rel) == 1)
    kernels_.merge_spans(args, item.tile, split.spans, partials, scratch);
}

void PagedAttention::run(ThreadPool& pool, const KvCache& cache, int layer, int window,
                         const float* q, std::ptrdiff_t ldq, float* out, std::ptrdiff_t ldo) {
  const AttentionArgs args = {.q = q,
                              .ldq = ldq,
                              .out = out,
                              .ldo = ldo,
                              .pages = cache.pages(layer),
                              .layout = cache.layout(),
                              .heads = heads_,
                              .window = window};
  for (std::size_t i = 0; i < splits_.size(); ++i) left_[i] = splits_[i].spans;
  const int items = static_cast<int>(items_.size()), threads = static_cast<int>(scratch_.size());
  std::atomic<int> next{0};
  // One long item a thread, so that the work is shared out here, in order and singly.
  pool.run(std::min(items, threads), [&](int, int thread) {
    for (int i = next++; i < items;) {
      // Where many short ones are left, the next is taken early, and its keys come meanwhile.
      const bool early = items_[i].tile.tokens == 1 && i + kItemsPerThread * threads < items;
      const int following = early ? next++ : items;
      compute(args, items_[i], following < items ? &items_[following] : nullptr,
              scratch_[thread].as<float>());
      i = early ? following : next++;
    }
  });
}

}  // namespace pyserve
