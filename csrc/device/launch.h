// Runs kernel bodies on the CPU: what device/launch.cuh does on CUDA. A body is a struct of
// pointers with `operator()(lanes, row)` and kLanes, how many lanes a row gets on CUDA, or with
// `operator()(index)` where there is nothing to share.
#pragma once

#include <atomic>
#include <cstdint>

#include "device/lanes.h"
#include "kernels/thread_pool.h"

namespace pyserve {

struct OnCpu {
  static constexpr bool kIsCuda = false;

  // Lanes of every row; above 1 in tests only.
  static inline std::atomic<int> emulated_lanes = 1;

  template <typename Body>
  static void rows(const at::Device&, int64_t count, const Body& body) {
    const int emulated = emulated_lanes;
    if (emulated > 1) {
      for (int64_t row = 0; row < count; ++row) {
        run_lanes(emulated, [&](const auto& lane) { body(lane, row); });
      }
      return;
    }
    shared_pool().run(int(count), [&](int row, int) { body(OneLane{}, int64_t(row)); });
  }

  template <typename Body>
  static void each(const at::Device&, int64_t count, const Body& body) {
    constexpr int64_t kAtOnce = 8192;
    shared_pool().run(int((count + kAtOnce - 1) / kAtOnce), [&](int item, int) {
      const int64_t end = std::min(count, (item + 1) * kAtOnce);
      for (int64_t i = item * kAtOnce; i < end; ++i) body(i);
    });
  }
};

}  // namespace pyserve
