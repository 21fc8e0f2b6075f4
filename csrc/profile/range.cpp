#include "profile/range.h"

#include <array>
#include <chrono>
#include <memory>
#include <mutex>

#include "third_party/nvtx3/nvToolsExt.h"

namespace pyserve::profile {

namespace {

std::mutex mutex;
std::array<OpTime, kOps.size()> times;  // under the mutex

thread_local Range* innermost = nullptr;  // of those that are timed

std::int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace

void start() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (std::size_t i = 0; i < times.size(); ++i) times[i] = {.op = static_cast<Op>(i)};
  detail::timing.store(true);
}

std::vector<OpTime> stop() {
  detail::timing.store(false);
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<OpTime> ran;
  for (const OpTime& time : times)
    if (time.calls > 0) ran.push_back(time);
  return ran;
}

void Range::begin(const Cost& cost) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    times[static_cast<int>(op_)].cost += cost;
  }
  timed_ = true;
  outer_ = innermost;
  innermost = this;
  began_ns_ = now_ns();
}

void Range::end() {
  const std::int64_t ns = now_ns() - began_ns_;
  innermost = outer_;
  if (outer_ != nullptr) outer_->inner_ns_ += ns;
  const std::lock_guard<std::mutex> lock(mutex);
  OpTime& time = times[static_cast<int>(op_)];
  ++time.calls;
  time.seconds += 1e-9 * static_cast<double>(ns - inner_ns_);
  time.total_seconds += 1e-9 * static_cast<double>(ns);
}

namespace detail {

// Names are registered once: a range then passes a handle to the tool, not a string.
struct Listener {
  nvtxDomainHandle_t domain;
  std::array<nvtxEventAttributes_t, kOps.size()> attributes;
};

namespace {

std::unique_ptr<Listener> find_listener() {
  const nvtxDomainHandle_t domain = nvtxDomainCreateA("pyserve");
  if (domain == nullptr) return nullptr;
  auto listener = std::make_unique<Listener>();
  listener->domain = domain;
  for (std::size_t i = 0; i < kOps.size(); ++i) {
    nvtxEventAttributes_t& attributes = listener->attributes[i];
    attributes = {};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
    attributes.message.registered = nvtxDomainRegisterStringA(domain, kOps[i].name);
  }
  return listener;
}

}  // namespace

const Listener* listener() {
  static const std::unique_ptr<Listener> found = find_listener();
  return found.get();
}

void push(const Listener& listener, Op op) {
  nvtxDomainRangePushEx(listener.domain, &listener.attributes[static_cast<int>(op)]);
}

void pop(const Listener& listener) { nvtxDomainRangePop(listener.domain); }

}  // namespace detail

}  // namespace pyserve::profile
