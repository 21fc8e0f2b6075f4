// Zeroed, aligned memory; large ones on huge pages where the system gives them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

namespace pyserve {

// Bytes from mmap: zero until written, page aligned, given back when the owner goes.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    data_ = data;
#ifdef MADV_HUGEPAGE
    // Streaming weights through 4 KiB pages costs TLB misses on every panel.
    if (bytes >= (std::size_t{1} << 21)) madvise(data, bytes, MADV_HUGEPAGE);
#endif
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(); }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }
  // At least so many bytes; what was there is lost where it has to grow.
  void reserve(std::size_t bytes) {
    if (bytes_ < bytes) *this = Buffer(bytes);
  }
  // Moves the contents to memory of somebody else, who keeps them longer; returns what is behind.
  std::byte* move_to(std::byte* place) {
    if (bytes_ == 0) return place;
    std::memcpy(place, data_, bytes_);
    release();
    data_ = place;
    owned_ = false;
    return place + (bytes_ + kAlignment - 1) / kAlignment * kAlignment;
  }
  static constexpr std::size_t kAlignment = 64;

 private:
  void release() {
    if (data_ != nullptr && owned_) munmap(data_, bytes_);
  }
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(owned_, other.owned_);
  }
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  bool owned_ = true;
};

}  // namespace pyserve
