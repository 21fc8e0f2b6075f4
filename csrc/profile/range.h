// Marks what the calling thread is doing: a named NVTX range, and a timer.
//
// Both are compiled in always. Where no tool listens and timing is off a Range is two loads and two
// branches. Ranges belong around a loop over threads, never inside of its body.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>
#include <vector>

#include "profile/op.h"

namespace pyserve::profile {

// Of one op since start(). seconds are its own: those of ranges inside of it are not counted.
struct OpTime {
  Op op;
  std::int64_t calls = 0;
  double seconds = 0;
  double total_seconds = 0;  // with those inside
  Cost cost;
};

// Forgets all times and begins to take them; until stop(), which returns those of ops that ran. Any
// thread; ranges that are open meanwhile are not counted.
void start();
std::vector<OpTime> stop();

namespace detail {

inline std::atomic<bool> timing{false};

// Null where no tool has been loaded into the process.
struct Listener;
const Listener* listener();
void push(const Listener& listener, Op op);
void pop(const Listener& listener);

}  // namespace detail

class Range {
 public:
  explicit Range(Op op) : Range(op, [] { return Cost{}; }) {}
  // cost() -> Cost is called only while times are taken.
  template <typename F>
  Range(Op op, const F& cost) : op_(op), listener_(detail::listener()) {
    if (listener_ != nullptr) [[unlikely]]
      detail::push(*listener_, op);
    if (detail::timing.load(std::memory_order_relaxed)) [[unlikely]]
      begin(cost());
  }
  ~Range() {
    if (timed_) [[unlikely]]
      end();
    if (listener_ != nullptr) [[unlikely]]
      detail::pop(*listener_);
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  void begin(const Cost& cost);
  void end();

  Op op_;
  bool timed_ = false;
  const detail::Listener* listener_;
  Range* outer_ = nullptr;
  std::int64_t began_ns_ = 0;
  std::int64_t inner_ns_ = 0;
};

}  // namespace pyserve::profile
