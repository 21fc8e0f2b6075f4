#include "model/prefault.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

namespace pyserve {

namespace {

// A huge page of x86 and of most others: what is asked for at once, so that a stop is not waited
// for long.
constexpr std::uintptr_t kPiece = std::uintptr_t{1} << 21;

void give_way_to_everybody() {
#ifdef SCHED_IDLE
  const sched_param none{};
  sched_setscheduler(0, SCHED_IDLE, &none);  // of this thread; without it, it is a thread as others
#endif
}

// False where the system does not do it.
bool populate([[maybe_unused]] std::uintptr_t begin, [[maybe_unused]] std::uintptr_t end) {
#ifdef MADV_POPULATE_WRITE
  return madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE) == 0;
#else
  return false;
#endif
}

}  // namespace

void Prefault::start(std::span<std::byte> memory) {
  stop();
  stop_.store(false);
  thread_ = std::thread([this, memory] { take(memory); });
}

void Prefault::stop() {
  stop_.store(true);
  await();
}

void Prefault::await() {
  if (thread_.joinable()) thread_.join();
}

void Prefault::take(std::span<std::byte> memory) {
  give_way_to_everybody();
  const auto end = reinterpret_cast<std::uintptr_t>(memory.data() + memory.size());
  auto at = reinterpret_cast<std::uintptr_t>(memory.data());
  while (at < end && !stop_.load()) {
    const std::uintptr_t next = std::min(end, (at / kPiece + 1) * kPiece);
    if (!populate(at, next)) return;
    at = next;
  }
}

}  // namespace pyserve
