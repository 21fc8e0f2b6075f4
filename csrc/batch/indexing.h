// Where a token of the flat step stands: one definition, for the CPU's loops and for CUDA's
// threads.
//
// Sequence s has the flat tokens [cu_seqlens[s], cu_seqlens[s + 1]); they are the last ones of the
// context_lens[s] tokens that its KV holds after the step.
#pragma once

#include <cstdint>

#include "device/host_device.h"

namespace pyserve {

// The sequence that flat token `token` belongs to; empty sequences own none.
PYSERVE_HOST_DEVICE inline int32_t sequence_of(const int32_t* cu_seqlens, int32_t num_seqs,
                                               int32_t token) {
  int32_t low = 0, high = num_seqs;  // cu_seqlens[low] <= token < cu_seqlens[high]
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    (cu_seqlens[middle] <= token ? low : high) = middle;
  }
  return low;
}

// Position in its sequence of flat token `token` of a sequence that ends before `seq_end`.
PYSERVE_HOST_DEVICE inline int32_t position_of(int32_t context_len, int32_t seq_end,
                                               int32_t token) {
  return context_len - (seq_end - token);
}

// Where the KV of `position` goes: block * block_size + offset.
PYSERVE_HOST_DEVICE inline int32_t slot_of(const int32_t* blocks, int32_t block_size,
                                           int32_t position) {
  return blocks[position / block_size] * block_size + position % block_size;
}

}  // namespace pyserve
