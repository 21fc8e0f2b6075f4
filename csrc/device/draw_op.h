// The op around DrawRows, written once for both devices; schema and meaning in bindings.cpp.
#pragma once

#include <ATen/ops/empty.h>

#include <tuple>

#include "device/draw.h"
#include "device/elements.h"

namespace pyserve {

constexpr int64_t kWishWords = sizeof(Wish) / sizeof(int32_t);
constexpr int64_t kEditWords = sizeof(Edit) / sizeof(int32_t);

using Drawn = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

template <typename Device>
Drawn draw_on(const at::Tensor& logits, const at::Tensor& wishes, int64_t width) {
  const at::Device device = logits.device();
  check_dense(logits, "logits", device, at::kFloat, 2);
  check_dense(wishes, "wishes", device, at::kInt, 1);
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  TORCH_CHECK_VALUE(0 < vocabulary && vocabulary <= 1 << kIdBits, "vocabulary of ", vocabulary,
                    ", at most ", 1 << kIdBits);
  TORCH_CHECK_VALUE(wishes.size(0) >= rows * kWishWords && width >= 0, "wishes must begin with ",
                    kWishWords, " words for each row of logits");
  const auto ints = logits.options().dtype(at::kInt);
  const Drawn out{at::empty({rows}, ints), at::empty({rows}, logits.options()),
                  at::empty({rows, width}, ints), at::empty({rows, width}, logits.options()),
                  at::empty({rows}, ints)};
  auto* words = wishes.mutable_data_ptr<int32_t>();
  Device::rows(device, rows,
               DrawRows{logits.mutable_data_ptr<float>(), int32_t(vocabulary),
                        reinterpret_cast<const Wish*>(words),
                        reinterpret_cast<Edit*>(words + rows * kWishWords), int32_t(width),
                        std::get<0>(out).mutable_data_ptr<int32_t>(),
                        std::get<1>(out).mutable_data_ptr<float>(),
                        std::get<2>(out).mutable_data_ptr<int32_t>(),
                        std::get<3>(out).mutable_data_ptr<float>(),
                        std::get<4>(out).mutable_data_ptr<int32_t>()});
  return out;
}

}  // namespace pyserve
