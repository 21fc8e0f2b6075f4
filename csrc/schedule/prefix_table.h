// Which full KV blocks hold which prefix, exactly: no hash collision can hand out wrong KV.
//
// A prefix is a chain: what came before it (`Prefix`) and one block of tokens. Equal chains get the
// same number, numbers are never used twice, and a look-up compares the tokens themselves. So a
// hash only finds the bucket, and may be cheap.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace pyserve {

// What stands before a block: nothing but a salt (root), or the chain with number `value`.
struct Prefix {
  uint64_t value;
  bool root;
  bool operator==(const Prefix&) const = default;
};

class PrefixTable {
 public:
  PrefixTable(int32_t num_blocks, int32_t block_size);

  // A block that holds `tokens` after `parent`, or -1.
  int32_t find(Prefix parent, std::span<const int32_t> tokens) const;

  // Files `block` (not filed yet) under its content. Several blocks may hold the same.
  void insert(int32_t block, Prefix parent, std::span<const int32_t> tokens);

  void erase(int32_t block);

  bool contains(int32_t block) const { return entries_[block].number != 0; }
  Prefix chain(int32_t block) const { return {entries_[block].number, false}; }
  Prefix parent(int32_t block) const { return entries_[block].parent; }
  std::span<const int32_t> tokens(int32_t block) const;
  int32_t size() const { return size_; }

 private:
  struct Entry {
    Prefix parent{};
    uint64_t number = 0;  // 0: not filed
    int32_t next = -1;    // in its bucket
  };

  size_t bucket(Prefix parent, std::span<const int32_t> tokens) const;

  std::vector<Entry> entries_;    // by block
  std::vector<int32_t> tokens_;   // by block, block_size each
  std::vector<int32_t> buckets_;  // first block, or -1; a power of two of them
  int32_t block_size_;
  int32_t size_ = 0;
  uint64_t last_number_ = 0;
  uint64_t seed_;  // drawn per table: buckets cannot be flooded by chosen tokens
};

}  // namespace pyserve
