// The kernels for any processor: 128-bit vectors, which every 64-bit target has (SSE2, NEON).
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/bf16.h"
#include "kernels/half.h"
#include "kernels/kernels.h"

#define PYSERVE_ISA portable
#define PYSERVE_LANES 4
#define PYSERVE_TILE_ROWS 6
#define PYSERVE_DEPTH_BLOCK 128

#include "kernels/isa_table.h"
#include "kernels/peak_int.h"
#include "kernels/quant_gemm.h"

namespace pyserve {

const Kernels& portable_kernels() {
  static const Kernels kernels = [] {
    Kernels table = portable::table("portable");
    portable::set_quant_gemm(table);
    table.peak_int = portable::peak_int;
    return table;
  }();
  return kernels;
}

}  // namespace pyserve
