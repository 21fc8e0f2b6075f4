// The kernels that pass over one row of activations, each by itself, for measuring.
#pragma once

#include <string_view>

#include "kernels/kernels.h"

namespace pyserve::profile {

// Seconds that one pass over rows of `width` floats takes on the calling thread, at best of what
// fits `seconds`. op: rms_norm, layer_norm, add, silu_mul, gelu_mul (width gates and width up
// values), rotate (heads of 64) or quantize. Throws std::invalid_argument for any other, and for a
// width that is no multiple of 64.
double time_rows(const Kernels& kernels, std::string_view op, int rows, int width, double seconds);

}  // namespace pyserve::profile
