// A small pool for data-parallel loops of a few microseconds.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace pyserve {

// Runs loops on the calling thread and size() - 1 workers, which spin shortly for the next loop and
// then sleep. A worker that comes late (no core was free) is not waited for: whoever is there does
// the items.
//
// A thread begins with its own share of neighbouring items, the same in every loop of so many: what
// it wrote in one loop is in its cache, and its own, in the next. A cache line that two processors
// write in turn costs both more than the arithmetic on it.
class ThreadPool {
 public:
  explicit ThreadPool(int size);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(item, thread) for every item in [0, items), thread in [0, size()): those of its own
  // share in ascending order, then the last ones of others that are not yet through. The body must
  // not throw and must not call run. One loop at a time: a second caller waits.
  template <typename Body>
  void run(int items, const Body& body) {
    run_erased(items, &body, [](const void* b, int item, int thread) {
      (*static_cast<const Body*>(b))(item, thread);
    });
  }

 private:
  using Call = void (*)(const void* body, int item, int thread);

  void run_erased(int items, const void* body, Call call);
  void work(int thread);
  void drain(int thread);
  void share_out(int items);
  bool enter(std::uint64_t& seen);

  // The open loop. Written only while no worker is inside: gate_ says so.
  const void* body_ = nullptr;
  Call call_ = nullptr;
  // Of each thread the items that nobody has taken: begin << 32 | end.
  struct alignas(64) Share {
    std::atomic<std::uint64_t> left{0};
  };
  std::unique_ptr<Share[]> shares_;
  // Loop number << 32 | open << 31 | workers inside.
  alignas(64) std::atomic<std::uint64_t> gate_{0};
  std::atomic<bool> stop_{false};
  std::mutex callers_;
  std::vector<std::thread> workers_;
};

// The pool that every forward pass of the process uses: PYSERVE_THREADS, or one thread for each
// processor that the process may run on.
ThreadPool& shared_pool();
// Replaces it; not while a forward pass runs. Throws std::invalid_argument unless 1 <= size <=
// 1024.
void set_num_threads(int size);

}  // namespace pyserve
