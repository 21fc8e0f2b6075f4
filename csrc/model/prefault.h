// Memory that is there before somebody needs it.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <thread>

namespace pyserve {

// The system gives memory when it is first written, and a huge page may cost milliseconds then,
// above all in a virtual machine. This takes it on a thread of its own, in time that nobody else
// wants. Where the system cannot do that, nothing is done.
class Prefault {
 public:
  Prefault() = default;
  ~Prefault() { stop(); }
  Prefault(const Prefault&) = delete;
  Prefault& operator=(const Prefault&) = delete;

  // From the memory's beginning on; contents stay. The memory must be there until stop() or
  // await().
  void start(std::span<std::byte> memory);
  void stop();
  // Until all is taken.
  void await();

 private:
  void take(std::span<std::byte> memory);

  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace pyserve
