// What rows of a block pool wish for, packed for device/draw.h: one small copy a step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/sample.h"

namespace pyserve {

struct PackedWishes {
  std::vector<int32_t> words;           // [R] Wish, then the edits
  std::vector<SampleFailure> failures;  // rows whose parameters name a token beyond the vocabulary
};

PackedWishes pack_wishes(const BlockPool& pool, const SamplerState& state,
                         std::span<const int32_t> rows, int64_t vocabulary);

}  // namespace pyserve
