// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): random numbers
// as a pure function of (key, counter), so that a draw depends on nothing but the request's seed
// and the position.
#pragma once

#include <array>
#include <cstdint>

#include "device/host_device.h"

namespace pyserve {

PYSERVE_HOST_DEVICE inline std::array<uint32_t, 4> philox(uint64_t key,
                                                          std::array<uint32_t, 4> counter) {
  auto low = uint32_t(key), high = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {uint32_t(b >> 32) ^ counter[1] ^ low, uint32_t(b),
               uint32_t(a >> 32) ^ counter[3] ^ high, uint32_t(a)};
    low += 0x9E3779B9;
    high += 0xBB67AE85;
  }
  return counter;
}

// Uniform in [0, 1), 53 bits, for the token at `position` of a sequence with this seed.
PYSERVE_HOST_DEVICE inline double uniform(uint64_t seed, uint64_t position) {
  const auto words = philox(seed, {uint32_t(position), uint32_t(position >> 32), 0, 0});
  const uint64_t bits = uint64_t{words[1]} << 32 | words[0];
  return double(bits >> 11) * 0x1p-53;
}

}  // namespace pyserve
