// What a step is made of, by the names that profilers and `pyserve bench step` show.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

namespace pyserve::profile {

// One more: here, and in the same place in kOps.
enum class Op : int {
  // Stages, on the thread that runs the step loop.
  step,
  plan,
  select,
  pack,
  forward,
  sample,
  route,
  hand_over,
  // Inside forward, in the order of the first layer.
  angles,
  embed,
  norm,
  quantize,
  qkv,
  rotary,
  attention,
  o,
  residual,
  gate_up,
  activation,
  down,
  lm_head,
  // Alone: packing's other ops.
  pad,
  unpad,
  locate,
};

struct OpName {
  Op op;
  const char* name;
};

inline constexpr auto kOps = std::to_array<OpName>({{Op::step, "step"},
                                                    {Op::plan, "plan"},
                                                    {Op::select, "select"},
                                                    {Op::pack, "pack"},
                                                    {Op::forward, "forward"},
                                                    {Op::sample, "sample"},
                                                    {Op::route, "route"},
                                                    {Op::hand_over, "hand_over"},
                                                    {Op::angles, "angles"},
                                                    {Op::embed, "embed"},
                                                    {Op::norm, "norm"},
                                                    {Op::quantize, "quantize"},
                                                    {Op::qkv, "qkv"},
                                                    {Op::rotary, "rotary"},
                                                    {Op::attention, "attention"},
                                                    {Op::o, "o"},
                                                    {Op::residual, "residual"},
                                                    {Op::gate_up, "gate_up"},
                                                    {Op::activation, "activation"},
                                                    {Op::down, "down"},
                                                    {Op::lm_head, "lm_head"},
                                                    {Op::pad, "pad"},
                                                    {Op::unpad, "unpad"},
                                                    {Op::locate, "locate"}});

constexpr bool in_order() {
  for (std::size_t i = 0; i < kOps.size(); ++i)
    if (kOps[i].op != static_cast<Op>(i)) return false;
  return true;
}
static_assert(in_order());

constexpr const char* name_of(Op op) { return kOps[static_cast<std::size_t>(op)].name; }

inline std::optional<Op> op_named(std::string_view name) {
  for (const OpName& known : kOps)
    if (name == known.name) return known.op;
  return std::nullopt;
}

// What an op cannot do without, whatever its code is like.
struct Cost {
  double memory_bytes = 0;      // weights, KV, logits: too much for a core's own cache
  double cached_bytes = 0;      // activations, read and written
  double float_operations = 0;  // float32; a multiply-add is two
  double int_operations = 0;    // 8-bit multiply-adds, two each
  double tile_operations = 0;   // bfloat16 multiply-adds in tile registers, two each

  Cost& operator+=(const Cost& other) {
    memory_bytes += other.memory_bytes;
    cached_bytes += other.cached_bytes;
    float_operations += other.float_operations;
    int_operations += other.int_operations;
    tile_operations += other.tile_operations;
    return *this;
  }
};

}  // namespace pyserve::profile
