#include "schedule/prefix_table.h"

#include <algorithm>
#include <bit>
#include <random>

namespace pyserve {
namespace {

uint64_t mix(uint64_t z) {  // splitmix64's finaliser
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

uint64_t draw_seed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

}  // namespace

PrefixTable::PrefixTable(int32_t num_blocks, int32_t block_size)
    : entries_(num_blocks),
      tokens_(size_t(num_blocks) * block_size),
      buckets_(std::bit_ceil(2 * size_t(num_blocks)), -1),
      block_size_(block_size),
      seed_(draw_seed()) {}

std::span<const int32_t> PrefixTable::tokens(int32_t block) const {
  return std::span(tokens_).subspan(size_t(block) * block_size_, block_size_);
}

size_t PrefixTable::bucket(Prefix parent, std::span<const int32_t> tokens) const {
  uint64_t hash = mix(seed_ ^ parent.value) + parent.root;
  for (int32_t token : tokens) hash = mix(hash + 0x9E3779B97F4A7C15 + uint32_t(token));
  return hash & (buckets_.size() - 1);
}

int32_t PrefixTable::find(Prefix parent, std::span<const int32_t> tokens) const {
  int32_t block = buckets_[bucket(parent, tokens)];
  while (block >= 0 &&
         !(entries_[block].parent == parent && std::ranges::equal(this->tokens(block), tokens))) {
    block = entries_[block].next;
  }
  return block;
}

void PrefixTable::insert(int32_t block, Prefix parent, std::span<const int32_t> tokens) {
  const int32_t same = find(parent, tokens);
  const uint64_t number = same >= 0 ? entries_[same].number : ++last_number_;
  std::ranges::copy(tokens, tokens_.begin() + size_t(block) * block_size_);
  int32_t& head = buckets_[bucket(parent, tokens)];
  entries_[block] = {parent, number, head};
  head = block;
  ++size_;
}

void PrefixTable::erase(int32_t block) {
  int32_t* link = &buckets_[bucket(entries_[block].parent, tokens(block))];
  while (*link != block) link = &entries_[*link].next;
  *link = entries_[block].next;
  entries_[block] = {};
  --size_;
}

}  // namespace pyserve
