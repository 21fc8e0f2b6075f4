#include "kernels/sampler_state.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace pyserve {
namespace {

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

void validate(const SamplingParams& p) {
  require(std::isfinite(p.temperature) && p.temperature >= 0, "temperature must be at least 0");
  require(p.top_p >= 0 && p.top_p <= 1, "top_p must be in 0..1");
  require(p.top_k >= 0, "top_k must be at least 0");
  require(p.min_p >= 0 && p.min_p <= 1, "min_p must be in 0..1");
  require(std::isfinite(p.frequency_penalty) && std::isfinite(p.presence_penalty),
          "penalties must be finite");
  require(std::isfinite(p.repetition_penalty) && p.repetition_penalty > 0,
          "repetition_penalty must be above 0");
  require(p.min_tokens >= 0, "min_tokens must be at least 0");
  require(p.logprobs >= -1, "logprobs must be at least -1");
  for (int32_t id : p.banned_until_min) require(id >= 0, "token ids must not be negative");
  for (const auto& [id, bias] : p.logit_bias) {
    require(id >= 0 && std::isfinite(bias), "logit_bias: ids not negative, values finite");
  }
}

}  // namespace

void SamplerState::set(int32_t row, SamplingParams params) {
  require(row >= 0, "row must not be negative");
  validate(params);
  if (size_t(row) >= params_.size()) params_.resize(row + 1);
  params_[row] = std::move(params);
}

void SamplerState::clear(int32_t row) {
  if (row >= 0 && size_t(row) < params_.size()) params_[row].reset();
}

const SamplingParams& SamplerState::at(int32_t row) const {
  if (row < 0 || size_t(row) >= params_.size() || !params_[row]) {
    throw std::invalid_argument("row " + std::to_string(row) + " has no sampling parameters");
  }
  return *params_[row];
}

}  // namespace pyserve
