// The best of many short runs: what the machine can do when nothing disturbs it.
#pragma once

#include <algorithm>
#include <chrono>

namespace pyserve::profile {

// The most that run() does in a second; it returns how much it did. As many runs as fit `seconds`,
// at least one, after one that only warms up.
template <typename Run>
double best_rate(double seconds, const Run& run) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  double best = 0;
  run();
  const auto begin = Clock::now();
  do {
    const auto at = Clock::now();
    const double amount = run();
    best = std::max(best, amount / since(at));
  } while (since(begin) < seconds);
  return best;
}

}  // namespace pyserve::profile
