// What this machine can do at best, measured.
#pragma once

#include <cstddef>

#include "kernels/kernels.h"

namespace pyserve::profile {

// Bytes a second that all threads of the shared pool together read, each of its own share of
// `bytes`, over and over: from memory where those are more than the caches hold. Best of what fits
// `seconds`.
double measure_read(const Kernels& kernels, std::size_t bytes, double seconds);

// Operations a second (a multiply-add is two) of all threads of the shared pool together; 0 where
// the instruction set has none such.
enum class Arithmetic { float32, int8, tile };
double measure_peak(const Kernels& kernels, Arithmetic arithmetic, double seconds);

}  // namespace pyserve::profile
