// Ragged to rectangular and back, on the CPU: whole sequences are copied as bytes, so any dtype
// will do.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "batch/ops.h"
#include "profile/range.h"
#include "tensors.h"

namespace pyserve::cpu {
namespace {

// Checks that the sequences tile [0, num_tokens); returns the longest one's length.
int64_t longest_of(std::span<const int32_t> cu_seqlens, int64_t num_tokens) {
  TORCH_CHECK_VALUE(!cu_seqlens.empty() && cu_seqlens.front() == 0 &&
                        cu_seqlens.back() == num_tokens && std::ranges::is_sorted(cu_seqlens),
                    "cu_seqlens must rise from 0 to the number of tokens (", num_tokens, ")");
  int64_t longest = 0;
  for (size_t s = 1; s < cu_seqlens.size(); ++s) {
    longest = std::max<int64_t>(longest, cu_seqlens[s] - cu_seqlens[s - 1]);
  }
  return longest;
}

// Calls copy(offset into flat, offset into rect, bytes) for every sequence.
template <typename Copy>
void for_each_sequence(std::span<const int32_t> cu_seqlens, int64_t max_len, int64_t token_bytes,
                       Copy copy) {
  for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
    copy(cu_seqlens[s] * token_bytes, int64_t(s) * max_len * token_bytes,
         (cu_seqlens[s + 1] - cu_seqlens[s]) * token_bytes);
  }
}

}  // namespace

at::Tensor pad(const at::Tensor& flat, const at::Tensor& cu_seqlens, const at::Scalar& value,
               std::optional<int64_t> max_len) {
  const profile::Range range(profile::Op::pad);
  TORCH_CHECK_VALUE(flat.dim() > 0, "flat must have a dimension of tokens");
  const auto starts = span_of<int32_t>(cu_seqlens, "cu_seqlens");
  const int64_t longest = longest_of(starts, flat.size(0));
  const int64_t width = max_len.value_or(longest);
  TORCH_CHECK_VALUE(width >= longest, "max_len ", width, " is less than the longest sequence, ",
                    longest);
  std::vector<int64_t> shape = flat.sizes().vec();
  shape[0] = width;
  shape.insert(shape.begin(), int64_t(starts.size()) - 1);
  const at::Tensor rect = at::full(shape, value, flat.options());
  const at::Tensor source = flat.contiguous();
  if (flat.numel() == 0) return rect;
  const auto* from = static_cast<const char*>(source.const_data_ptr());
  auto* to = static_cast<char*>(rect.mutable_data_ptr());
  const int64_t token_bytes = int64_t(source.nbytes()) / flat.size(0);
  for_each_sequence(starts, width, token_bytes, [&](int64_t at_flat, int64_t at_rect, int64_t n) {
    std::memcpy(to + at_rect, from + at_flat, n);
  });
  return rect;
}

at::Tensor unpad(const at::Tensor& rect, const at::Tensor& cu_seqlens,
                 std::optional<int64_t> num_tokens) {
  const profile::Range range(profile::Op::unpad);
  TORCH_CHECK_VALUE(rect.dim() > 1, "rect must have dimensions of sequences and tokens");
  const auto starts = span_of<int32_t>(cu_seqlens, "cu_seqlens");
  TORCH_CHECK_VALUE(rect.size(0) + 1 == int64_t(starts.size()),
                    "cu_seqlens must have one more element than rect has sequences");
  const int64_t tokens = num_tokens.value_or(starts.back());
  const int64_t longest = longest_of(starts, tokens);
  TORCH_CHECK_VALUE(longest <= rect.size(1), "the longest sequence, ", longest,
                    ", is wider than rect, ", rect.size(1));
  std::vector<int64_t> shape = rect.sizes().vec();
  shape.erase(shape.begin());
  shape[0] = tokens;
  const at::Tensor flat = at::empty(shape, rect.options());
  const at::Tensor source = rect.contiguous();
  if (flat.numel() == 0) return flat;
  const auto* from = static_cast<const char*>(source.const_data_ptr());
  auto* to = static_cast<char*>(flat.mutable_data_ptr());
  const int64_t token_bytes = int64_t(flat.nbytes()) / tokens;
  for_each_sequence(starts, rect.size(1), token_bytes,
                    [&](int64_t at_flat, int64_t at_rect, int64_t n) {
                      std::memcpy(to + at_flat, from + at_rect, n);
                    });
  return flat;
}

}  // namespace pyserve::cpu
