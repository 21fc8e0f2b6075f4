#include "kernels/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>

namespace pyserve {

namespace {

constexpr std::uint64_t kOpen = std::uint64_t{1} << 31;
constexpr std::uint64_t kInside = kOpen - 1;
constexpr std::uint64_t kItem = 0xFFFFFFFF;
constexpr auto kSpin = std::chrono::microseconds(50);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int size) : shares_(std::make_unique<Share[]>(size)) {
  workers_.reserve(size - 1);
  for (int thread = 1; thread < size; ++thread)
    workers_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  gate_.fetch_add(std::uint64_t{1} << 32);
  gate_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::share_out(int items) {
  for (int thread = 0; thread < size(); ++thread) {
    const auto bound = [&](int i) { return std::uint64_t(items) * i / size(); };
    shares_[thread].left.store(bound(thread) << 32 | bound(thread + 1));
  }
}

void ThreadPool::drain(int thread) {
  for (int i = 0; i < size(); ++i) {
    const int owner = (thread + i) % size();
    std::atomic<std::uint64_t>& left = shares_[owner].left;
    for (std::uint64_t seen = left.load(); seen >> 32 < (seen & kItem);) {
      const bool own = owner == thread;
      if (!left.compare_exchange_weak(seen, own ? seen + (kItem + 1) : seen - 1)) continue;
      call_(body_, static_cast<int>(own ? seen >> 32 : (seen & kItem) - 1), thread);
      seen = left.load();
    }
  }
}

void ThreadPool::run_erased(int items, const void* body, Call call) {
  if (workers_.empty() || items <= 1) {
    for (int item = 0; item < items; ++item) call(body, item, 0);
    return;
  }
  const std::lock_guard<std::mutex> lock(callers_);
  body_ = body;
  call_ = call;
  share_out(items);
  const std::uint64_t number = (gate_.load() >> 32) + 1;
  gate_.store(number << 32 | kOpen);
  gate_.notify_all();  // costs a system call only where a worker sleeps
  drain(0);
  gate_.fetch_and(~kOpen);
  // Those inside finish the item they hold; nobody enters any more. One that has lost its core
  // needs ours.
  for (int spin = 1; (gate_.load() & kInside) != 0; ++spin)
    if (spin % 4096 != 0)
      pause();
    else
      std::this_thread::yield();
}

// Waits for a loop other than `seen` and counts this worker in. False: it has already closed, or
// the pool stops.
bool ThreadPool::enter(std::uint64_t& seen) {
  std::uint64_t gate = gate_.load();
  const auto until = std::chrono::steady_clock::now() + kSpin;
  for (int spin = 0; gate >> 32 == seen; gate = gate_.load()) {
    if (++spin % 64 != 0 || std::chrono::steady_clock::now() < until)
      pause();
    else
      gate_.wait(gate);
  }
  while ((gate & kOpen) != 0) {
    if (gate_.compare_exchange_weak(gate, gate + 1)) {
      seen = gate >> 32;
      return true;
    }
  }
  seen = gate >> 32;
  return false;
}

void ThreadPool::work(int thread) {
  std::uint64_t seen = 0;
  while (!stop_.load()) {
    if (!enter(seen)) continue;
    drain(thread);
    gate_.fetch_sub(1);
  }
}

namespace {

// Processors that the container's quota amounts to, rounded up (cgroup v2, else v1); many where
// there is none. More threads than that would be stopped in the middle of a loop, with the others
// waiting for them.
int quota() {
  constexpr int kNone = 1024;
  std::string limit;
  double period = 0;
  if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); v2 >> limit >> period) {
    if (limit == "max") return kNone;
  } else if (std::ifstream quota_us("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
             period_us("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
             !(quota_us >> limit) || !(period_us >> period)) {
    return kNone;
  }
  const double processors = period > 0 ? std::atof(limit.c_str()) / period : 0;
  return processors > 0 && processors < kNone ? static_cast<int>(std::ceil(processors)) : kNone;
}

int default_size() {
  if (const char* asked = std::getenv("PYSERVE_THREADS"); asked != nullptr && *asked != '\0') {
    const int size = std::atoi(asked);
    if (size < 1 || size > 1024)
      throw std::invalid_argument("PYSERVE_THREADS must be from 1 to 1024, got '" +
                                  std::string(asked) + "'");
    return size;
  }
  const int processors = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return std::clamp(quota(), 1, processors);
}

std::unique_ptr<ThreadPool>& pool_slot() {
  static std::unique_ptr<ThreadPool> pool;
  return pool;
}

std::mutex& pool_mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

ThreadPool& shared_pool() {
  const std::lock_guard<std::mutex> lock(pool_mutex());
  auto& pool = pool_slot();
  if (pool == nullptr) pool = std::make_unique<ThreadPool>(default_size());
  return *pool;
}

void set_num_threads(int size) {
  if (size < 1 || size > 1024)
    throw std::invalid_argument("number of threads must be from 1 to 1024, got " +
                                std::to_string(size));
  const std::lock_guard<std::mutex> lock(pool_mutex());
  auto& pool = pool_slot();
  if (pool == nullptr || pool->size() != size) {
    pool.reset();
    pool = std::make_unique<ThreadPool>(size);
  }
}

}  // namespace pyserve
