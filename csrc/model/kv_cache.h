// The paged keys and values of every layer. Which block belongs to whom is the block pool's affair.
#pragma once

#include <span>
#include <stdexcept>

#include "kernels/buffer.h"
#include "kernels/kernels.h"
#include "model/config.h"

namespace pyserve {

// One allocation, block after block; memory is zero until written, and the system hands it out as
// blocks are first used.
class KvCache {
 public:
  KvCache() = default;
  // Throws std::invalid_argument for what the type cannot hold.
  KvCache(const Kernels& kernels, KvType type, int layers, int kv_heads, int head_dim,
          int num_blocks, int block_size)
      : layout_(type, layers, kv_heads, head_dim, block_size, kernels.lanes, kernels.kv_tiles),
        num_blocks_(num_blocks),
        write_(kernels.write_kv[static_cast<int>(type)]) {
    if (type == KvType::int8 && head_dim > kMaxInt8HeadDim)
      throw std::invalid_argument("int8 keys and values are for heads of at most 1024 elements");
    pages_ = Buffer(num_blocks * layout_.block_bytes);
  }

  int num_blocks() const { return num_blocks_; }
  int block_size() const { return layout_.block_size; }
  const KvLayout& layout() const { return layout_; }
  std::size_t bytes() const { return pages_.bytes(); }
  std::span<std::byte> memory() const { return {pages_.as<std::byte>(), pages_.bytes()}; }

  // The layer's pages in block 0.
  const std::byte* pages(int layer) const {
    return pages_.as<std::byte>() + layer * layout_.layer_bytes;
  }

  // Writes one token's keys and values (float32 [kv_heads, head_dim] each) into its slot.
  void write(int layer, int slot, const float* key, const float* value) {
    const std::ptrdiff_t block = slot / layout_.block_size;
    write_(layout_,
           pages_.as<std::byte>() + block * layout_.block_bytes + layer * layout_.layer_bytes,
           slot % layout_.block_size, key, value);
  }

 private:
  KvLayout layout_;
  int num_blocks_ = 0;
  void (*write_)(const KvLayout&, std::byte*, int, const float*, const float*) = nullptr;
  Buffer pages_;
};

}  // namespace pyserve
