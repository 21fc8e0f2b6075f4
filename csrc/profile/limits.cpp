#include "profile/limits.h"

#include <algorithm>
#include <vector>

#include "kernels/buffer.h"
#include "kernels/thread_pool.h"
#include "profile/best.h"

namespace pyserve::profile {

double measure_read(const Kernels& kernels, std::size_t bytes, double seconds) {
  constexpr double kLeastBytes = 64 << 20;  // in one run: waking the threads must not weigh
  ThreadPool& pool = shared_pool();
  const int items = pool.size();
  const std::size_t share = bytes / items / 4096 * 4096;
  if (share == 0) return 0;
  const Buffer buffer(share * items);
  char* data = buffer.as<char>();
  std::fill(data, data + buffer.bytes(), 1);  // else all of it is one page of zeros
  const int passes = std::max(1, static_cast<int>(kLeastBytes / double(buffer.bytes())));
  return best_rate(seconds, [&] {
    pool.run(items, [&](int item, int) {
      for (int pass = 0; pass < passes; ++pass) kernels.read_bytes(data + item * share, share);
    });
    return double(passes) * double(buffer.bytes());
  });
}

double measure_peak(const Kernels& kernels, Arithmetic arithmetic, double seconds) {
  constexpr std::int64_t kTurns = 200'000;  // about a millisecond
  const auto peak = arithmetic == Arithmetic::float32 ? kernels.peak_float
                    : arithmetic == Arithmetic::int8  ? kernels.peak_int
                                                      : kernels.peak_tile;
  if (peak == nullptr) return 0;
  ThreadPool& pool = shared_pool();
  std::vector<double> operations(pool.size());
  return best_rate(seconds, [&] {
    pool.run(pool.size(), [&](int item, int) { operations[item] = peak(kTurns); });
    double total = 0;
    for (const double each : operations) total += each;
    return total;
  });
}

}  // namespace pyserve::profile
