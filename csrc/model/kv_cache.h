// The paged keys and values of every layer. Which block belongs to whom is the block pool's affair.
#pragma once

#include "kernels/bf16.h"
#include "kernels/buffer.h"
#include "kernels/kernels.h"
#include "model/config.h"

namespace pyserve {

// Layout: see AttentionArgs. One allocation a layer and kind; memory is zero until written, and the
// system hands it out page by page on first use.
class KvCache {
 public:
  KvCache() = default;
  KvCache(const DecoderConfig& config, const Kernels& kernels, DType dtype, int num_blocks,
          int block_size)
      : dtype_(dtype),
        kv_heads_(config.num_kv_heads),
        head_dim_(config.head_dim),
        num_blocks_(num_blocks),
        block_size_(block_size),
        key_stride_(static_cast<int>(round_up(block_size, kernels.lanes))),
        value_stride_(static_cast<int>(round_up(config.head_dim, kernels.lanes))) {
    const std::size_t pages = std::size_t(num_blocks) * kv_heads_;
    for (int i = 0; i < config.num_layers; ++i) {
      keys_.emplace_back(pages * head_dim_ * key_stride_ * element_size(dtype));
      values_.emplace_back(pages * block_size * value_stride_ * element_size(dtype));
    }
  }

  int num_blocks() const { return num_blocks_; }
  int block_size() const { return block_size_; }
  int key_stride() const { return key_stride_; }
  int value_stride() const { return value_stride_; }
  const void* keys(int layer) const { return keys_[layer].as<void>(); }
  const void* values(int layer) const { return values_[layer].as<void>(); }

  std::size_t bytes() const {
    std::size_t total = 0;
    for (std::size_t i = 0; i < keys_.size(); ++i) total += keys_[i].bytes() + values_[i].bytes();
    return total;
  }

  // Writes one token's keys and values (float32 [kv_heads, head_dim] each) into its slot.
  void write(int layer, int slot, const float* key, const float* value) {
    if (dtype_ == DType::float32)
      write_as<float>(layer, slot, key, value);
    else
      write_as<bf16>(layer, slot, key, value);
  }

 private:
  template <typename T>
  void write_as(int layer, int slot, const float* key, const float* value) {
    const std::ptrdiff_t block = slot / block_size_, offset = slot % block_size_;
    for (int head = 0; head < kv_heads_; ++head) {
      const std::ptrdiff_t page = block * kv_heads_ + head;
      T* keys = keys_[layer].as<T>() + page * head_dim_ * key_stride_ + offset;
      T* values = values_[layer].as<T>() + (page * block_size_ + offset) * value_stride_;
      const int from = head * head_dim_;
      for (int i = 0; i < head_dim_; ++i) {
        keys[std::ptrdiff_t{i} * key_stride_] = from_float<T>(key[from + i]);
        values[i] = from_float<T>(value[from + i]);
      }
    }
  }

  DType dtype_ = DType::float32;
  int kv_heads_ = 0;
  int head_dim_ = 0;
  int num_blocks_ = 0;
  int block_size_ = 0;
  int key_stride_ = 0;
  int value_stride_ = 0;
  std::vector<Buffer> keys_;
  std::vector<Buffer> values_;
};

}  // namespace pyserve
