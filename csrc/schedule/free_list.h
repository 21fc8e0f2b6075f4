// Free KV blocks, least recently freed first: an intrusive doubly linked list over block numbers,
// so that a block leaves from the middle in O(1) (vLLM's FreeKVCacheBlockQueue).
#pragma once

#include <cstdint>
#include <vector>

namespace pyserve {

class FreeList {
 public:
  explicit FreeList(int32_t num_blocks)
      : next_(num_blocks + 1), prev_(num_blocks + 1), end_(num_blocks) {
    for (int32_t node = 0; node <= num_blocks; ++node) {
      next_[node] = node == num_blocks ? 0 : node + 1;
      prev_[node] = node == 0 ? num_blocks : node - 1;
    }
    size_ = num_blocks;
  }

  int32_t size() const { return size_; }
  bool contains(int32_t block) const { return next_[block] != kOut; }

  // The next to be reused; `end()` if there is none.
  int32_t front() const { return next_[end_]; }
  int32_t after(int32_t block) const { return next_[block]; }
  int32_t end() const { return end_; }

  void push_back(int32_t block) { insert(block, end_); }
  void push_front(int32_t block) { insert(block, next_[end_]); }

  void remove(int32_t block) {
    next_[prev_[block]] = next_[block];
    prev_[next_[block]] = prev_[block];
    next_[block] = kOut;
    --size_;
  }

 private:
  static constexpr int32_t kOut = -1;

  void insert(int32_t block, int32_t before) {
    next_[block] = before;
    prev_[block] = prev_[before];
    next_[prev_[block]] = block;
    prev_[before] = block;
    ++size_;
  }

  std::vector<int32_t> next_, prev_;  // node `end_` is the fake head and tail at once
  int32_t end_;
  int32_t size_ = 0;
};

}  // namespace pyserve
