// The paged KV cache's accounting: sequences (rows), their block tables, reference counts, prefix
// reuse.
//
// The mutable state in one sentence: every block is owned (referenced by one or more tables),
// cached (no reference, but a known prefix), or free (neither), and the last two wait in one LRU
// list. Released blocks keep their prefix until they are reused, so eviction needs no structure of
// its own (as in vLLM).
//
// Belongs to one thread; nothing here locks. Errors are std::invalid_argument for a wrong call and
// std::runtime_error for a broken invariant, and leave the pool as it was.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "schedule/free_list.h"
#include "schedule/prefix_table.h"

namespace pyserve {

struct PoolStatistics {
  int64_t num_blocks, free, cached, owned;
  int64_t prefix_queries;  // tokens looked up by match
  int64_t prefix_hits;     // tokens of those found
  int64_t evictions;       // cached blocks that were reused for something else
  int64_t rows;
};

class BlockPool {
 public:
  BlockPool(int64_t num_blocks, int64_t block_size, bool prefix_cache);

  int32_t add(std::span<const int32_t> tokens, int64_t prompt_len, uint64_t salt, int64_t tenant);
  void append(std::span<const int32_t> rows, std::span<const int32_t> tokens);
  void advance(std::span<const int32_t> rows, std::span<const int32_t> takes);
  int64_t match(int32_t row);
  int64_t fork(int32_t parent, int32_t child);

  // Makes the row's table long enough for `tokens` tokens; false, and nothing done, if blocks lack.
  bool reserve(int32_t row, int64_t tokens);
  // The same for all known tokens of each row (distinct); false, and nothing done, if blocks lack.
  bool reserve_all(std::span<const int32_t> rows);
  // Gives back the row's blocks beyond `keep_blocks`.
  void trim(int32_t row, int64_t keep_blocks);
  void release(int32_t row);

  int64_t length(int32_t row) const { return int64_t(at(row).tokens.size()); }
  int64_t computed(int32_t row) const { return at(row).computed; }
  int64_t prompt_len(int32_t row) const { return at(row).prompt_len; }
  std::span<const int32_t> blocks(int32_t row) const { return at(row).blocks; }
  std::span<const int32_t> tokens(int32_t row) const { return at(row).tokens; }

  int64_t num_blocks() const { return num_blocks_; }
  int64_t block_size() const { return block_size_; }
  int64_t available() const { return free_.size(); }  // free + cached
  int64_t references(int32_t block) const { return references_[block]; }
  int64_t row_slots() const { return int64_t(rows_.size()); }  // all rows are below this
  int64_t blocks_for(int64_t tokens) const { return (tokens + block_size_ - 1) / block_size_; }
  int64_t tenant_blocks(int64_t tenant) const;

  PoolStatistics statistics() const;
  void check() const;

 private:
  struct Row {
    std::vector<int32_t> tokens, blocks;
    int64_t prompt_len = 0;
    int64_t computed = 0;  // tokens [0, computed) have their KV in `blocks`
    int64_t tenant = 0;
    uint64_t salt = 0;
    bool live = false;
  };

  const Row& at(int32_t row) const;
  Row& at(int32_t row) { return const_cast<Row&>(std::as_const(*this).at(row)); }
  static void require_no_blocks(const Row& row, int32_t index);
  std::span<const int32_t> block_tokens(const Row& row, int64_t index) const;

  int32_t take_free();
  void share(Row& row, int32_t block);
  void drop_last(Row& row);
  void file_full_blocks(Row& row, int64_t computed_before);

  int64_t num_blocks_, block_size_;
  bool prefix_cache_;
  FreeList free_;
  PrefixTable prefixes_;
  std::vector<int32_t> references_;  // by block
  std::vector<Row> rows_;
  std::vector<int32_t> idle_rows_;                    // released, to be used again
  std::unordered_map<int64_t, int64_t> tenant_refs_;  // table entries by tenant; no zeros
  int64_t cached_ = 0;                                // blocks in free_ that have a prefix
  int64_t prefix_queries_ = 0, prefix_hits_ = 0, evictions_ = 0;
};

}  // namespace pyserve
