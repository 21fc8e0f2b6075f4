// How a kernel body sees the threads that share a row of work.
//
// A body is called by every lane with the same arguments. Lane `index` of `count` takes elements
// index, index + count, ...; sum and max combine a value of each lane and give all of them the
// result, in an order that depends on `count` alone. All lanes must reach them, and sync, alike.
//
// On CUDA the lanes are a warp or a block (device/launch.cuh). On the CPU it is one lane, or, so
// that tests see what only several lanes can get wrong, as many threads.
#pragma once

#include <barrier>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "device/host_device.h"

namespace pyserve {

struct OneLane {
  int index = 0;
  int count = 1;

  template <typename T>
  T sum(T value) const {
    return value;
  }
  template <typename T>
  T max(T value) const {
    return value;
  }
  void sync() const {}
};

class EmulatedLanes {
 public:
  // What the lanes of one row share.
  struct Shared {
    explicit Shared(int lanes) : barrier(lanes), slots(lanes) {}
    std::barrier<> barrier;
    std::vector<std::uint64_t> slots;
  };

  EmulatedLanes(int lane, Shared& shared)
      : index(lane), count(int(shared.slots.size())), shared_(shared) {}

  template <typename T>
  T sum(T value) const {
    return combine(value, [](T a, T b) { return T(a + b); });
  }
  template <typename T>
  T max(T value) const {
    return combine(value, [](T a, T b) { return a < b ? b : a; });
  }
  void sync() const { shared_.barrier.arrive_and_wait(); }

  const int index;
  const int count;

 private:
  template <typename T, typename F>
  T combine(T value, F f) const {
    static_assert(sizeof(T) <= sizeof(std::uint64_t));
    std::memcpy(&shared_.slots[index], &value, sizeof(T));
    sync();
    T result, other;
    std::memcpy(&result, &shared_.slots[0], sizeof(T));
    for (int lane = 1; lane < count; ++lane) {
      std::memcpy(&other, &shared_.slots[lane], sizeof(T));
      result = f(result, other);
    }
    sync();  // nobody writes before all have read
    return result;
  }

  Shared& shared_;
};

// Calls body(lanes) once, or on `count` threads that are each other's lanes.
template <typename Body>
void run_lanes(int count, const Body& body) {
  if (count == 1) return body(OneLane{});
  EmulatedLanes::Shared shared(count);
  std::vector<std::jthread> threads;
  for (int lane = 0; lane < count; ++lane) {
    threads.emplace_back([&, lane] { body(EmulatedLanes(lane, shared)); });
  }
}

}  // namespace pyserve
