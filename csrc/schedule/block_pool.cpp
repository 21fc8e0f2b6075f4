#include "schedule/block_pool.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace pyserve {
namespace {

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

int32_t checked_blocks(int64_t num_blocks, int64_t block_size) {
  require(num_blocks > 0 && block_size > 0, "num_blocks and block_size must be positive");
  require(num_blocks <= std::numeric_limits<int32_t>::max() / block_size,
          "num_blocks * block_size must fit 32 bits (slots are int32)");
  return int32_t(num_blocks);
}

}  // namespace

BlockPool::BlockPool(int64_t num_blocks, int64_t block_size, bool prefix_cache)
    : num_blocks_(checked_blocks(num_blocks, block_size)),
      block_size_(block_size),
      prefix_cache_(prefix_cache),
      free_(int32_t(num_blocks)),
      prefixes_(int32_t(num_blocks), int32_t(block_size)),
      references_(num_blocks, 0) {}

const BlockPool::Row& BlockPool::at(int32_t row) const {
  if (row < 0 || size_t(row) >= rows_.size() || !rows_[row].live) {
    throw std::invalid_argument("row " + std::to_string(row) +
                                " is not live (never added, or released already)");
  }
  return rows_[row];
}

int32_t BlockPool::add(std::span<const int32_t> tokens, int64_t prompt_len, uint64_t salt,
                       int64_t tenant) {
  require(prompt_len > 0 && prompt_len <= int64_t(tokens.size()),
          "prompt_len must be in 1..len(tokens)");
  require(std::ranges::min(tokens) >= 0, "token ids must not be negative");
  if (idle_rows_.empty()) {
    idle_rows_.push_back(int32_t(rows_.size()));
    rows_.emplace_back();
  }
  const int32_t row = idle_rows_.back();
  idle_rows_.pop_back();
  rows_[row] = {.tokens = {tokens.begin(), tokens.end()},
                .blocks = {},
                .prompt_len = prompt_len,
                .tenant = tenant,
                .salt = salt,
                .live = true};
  return row;
}

void BlockPool::append(std::span<const int32_t> rows, std::span<const int32_t> tokens) {
  require(rows.size() == tokens.size(), "rows and tokens differ in length");
  for (int32_t row : rows) at(row);
  for (int32_t token : tokens) require(token >= 0, "token ids must not be negative");
  for (size_t i = 0; i < rows.size(); ++i) rows_[rows[i]].tokens.push_back(tokens[i]);
}

void BlockPool::advance(std::span<const int32_t> rows, std::span<const int32_t> takes) {
  require(rows.size() == takes.size(), "rows and takes differ in length");
  const auto advanced = [&](size_t i) {
    const Row& row = at(rows[i]);
    const int64_t computed = row.computed + takes[i];
    const auto most = std::min(row.tokens.size(), row.blocks.size() * block_size_);
    if (takes[i] < 0 || computed > int64_t(most)) {
      throw std::invalid_argument("row " + std::to_string(rows[i]) + " cannot advance by " +
                                  std::to_string(takes[i]) + ": beyond its tokens or its blocks");
    }
    return computed;
  };
  for (size_t i = 0; i < rows.size(); ++i) advanced(i);  // all or nothing
  for (size_t i = 0; i < rows.size(); ++i) {
    Row& row = rows_[rows[i]];
    const int64_t before = std::exchange(row.computed, advanced(i));
    if (prefix_cache_) file_full_blocks(row, before);
  }
}

void BlockPool::require_no_blocks(const Row& row, int32_t index) {
  if (!row.blocks.empty()) {
    throw std::invalid_argument("row " + std::to_string(index) + " owns blocks already");
  }
}

std::span<const int32_t> BlockPool::block_tokens(const Row& row, int64_t index) const {
  return std::span(row.tokens).subspan(index * block_size_, block_size_);
}

void BlockPool::file_full_blocks(Row& row, int64_t computed_before) {
  for (int64_t i = computed_before / block_size_; i < row.computed / block_size_; ++i) {
    const Prefix parent = i == 0 ? Prefix{row.salt, true} : prefixes_.chain(row.blocks[i - 1]);
    prefixes_.insert(row.blocks[i], parent, block_tokens(row, i));
  }
}

int64_t BlockPool::match(int32_t index) {
  Row& row = at(index);
  require_no_blocks(row, index);
  if (!prefix_cache_) return 0;
  // The last token is always computed: its logits are wanted.
  const int64_t most = (int64_t(row.tokens.size()) - 1) / block_size_;
  Prefix parent{row.salt, true};
  for (int64_t i = 0; i < most; ++i) {
    const int32_t block = prefixes_.find(parent, block_tokens(row, i));
    if (block < 0) break;
    share(row, block);
    parent = prefixes_.chain(block);
  }
  row.computed = int64_t(row.blocks.size()) * block_size_;
  prefix_queries_ += int64_t(row.tokens.size());
  prefix_hits_ += row.computed;
  return row.computed;
}

int64_t BlockPool::fork(int32_t parent_index, int32_t child_index) {
  const Row& parent = at(parent_index);
  Row& child = at(child_index);
  require_no_blocks(child, child_index);
  require(parent.salt == child.salt, "rows of different salts share no blocks");
  const int64_t prompt = std::min(parent.prompt_len, child.prompt_len);
  const auto [differ, _] =
      std::mismatch(parent.tokens.begin(), parent.tokens.begin() + prompt, child.tokens.begin());
  const int64_t common = differ - parent.tokens.begin();
  const int64_t tokens = std::min({common, parent.computed, int64_t(child.tokens.size()) - 1});
  for (int64_t i = 0; i < tokens / block_size_; ++i) share(child, parent.blocks[i]);
  child.computed = int64_t(child.blocks.size()) * block_size_;
  return child.computed;
}

bool BlockPool::reserve(int32_t index, int64_t tokens) {
  Row& row = at(index);
  const int64_t lacking = blocks_for(tokens) - int64_t(row.blocks.size());
  if (lacking > available()) return false;
  for (int64_t i = 0; i < lacking; ++i) share(row, take_free());
  return true;
}

bool BlockPool::reserve_all(std::span<const int32_t> rows) {
  int64_t lacking = 0;
  for (int32_t index : rows) {
    const Row& row = at(index);
    lacking += std::max<int64_t>(blocks_for(row.tokens.size()) - int64_t(row.blocks.size()), 0);
  }
  if (lacking > available()) return false;
  for (int32_t index : rows) reserve(index, int64_t(rows_[index].tokens.size()));
  return true;
}

void BlockPool::trim(int32_t index, int64_t keep_blocks) {
  Row& row = at(index);
  require(keep_blocks >= 0, "keep_blocks must not be negative");
  while (int64_t(row.blocks.size()) > keep_blocks) drop_last(row);
  row.computed = std::min(row.computed, int64_t(row.blocks.size()) * block_size_);
}

void BlockPool::release(int32_t index) {
  Row& row = at(index);
  while (!row.blocks.empty()) drop_last(row);
  row = Row{};
  idle_rows_.push_back(index);
}

// Reuses the least recently freed block, whose prefix is forgotten. There must be one.
int32_t BlockPool::take_free() {
  const int32_t block = free_.front();
  if (prefixes_.contains(block)) {
    prefixes_.erase(block);
    --cached_;
    ++evictions_;
  }
  return block;
}

void BlockPool::share(Row& row, int32_t block) {
  row.blocks.push_back(block);
  if (references_[block]++ == 0) {
    free_.remove(block);
    cached_ -= prefixes_.contains(block);
  }
  ++tenant_refs_[row.tenant];
}

// Tail first, so that within one sequence the end of a prefix is always reused before its
// beginning. What nobody can find again goes to the front: it is worth nothing.
void BlockPool::drop_last(Row& row) {
  const int32_t block = row.blocks.back();
  row.blocks.pop_back();
  if (--references_[block] == 0) {
    const bool findable = prefixes_.contains(block);
    findable ? free_.push_back(block) : free_.push_front(block);
    cached_ += findable;
  }
  const auto refs = tenant_refs_.find(row.tenant);
  if (--refs->second == 0) tenant_refs_.erase(refs);
}

int64_t BlockPool::tenant_blocks(int64_t tenant) const {
  const auto refs = tenant_refs_.find(tenant);
  return refs == tenant_refs_.end() ? 0 : refs->second;
}

PoolStatistics BlockPool::statistics() const {
  return {.num_blocks = num_blocks_,
          .free = available() - cached_,
          .cached = cached_,
          .owned = num_blocks_ - available(),
          .prefix_queries = prefix_queries_,
          .prefix_hits = prefix_hits_,
          .evictions = evictions_,
          .rows = int64_t(rows_.size() - idle_rows_.size())};
}

}  // namespace pyserve
