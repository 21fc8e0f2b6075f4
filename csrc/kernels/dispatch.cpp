// Chooses the instruction set once, by what the processor reports or PYSERVE_ISA says.
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels/kernels.h"

namespace pyserve {

namespace {

// Linux gives a process the tile registers when it asks: their state makes its threads' larger.
bool tiles_permitted() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
#else
  return false;
#endif
}

}  // namespace

bool isa_supported(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::portable:
      return true;
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::amx:
      return isa_supported(Isa::avx512) && __builtin_cpu_supports("avx512vnni") &&
             __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-tile") &&
             __builtin_cpu_supports("amx-bf16") && tiles_permitted();
  }
#endif
  return isa == Isa::portable;
}

bool has_bfloat16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

namespace {

const Kernels& table_of(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::amx) return amx_kernels();
  if (isa == Isa::avx512) return avx512_kernels();
  if (isa == Isa::avx2) return avx2_kernels();
#endif
  return portable_kernels();
}

Isa best_isa() {
  for (Isa isa : {Isa::amx, Isa::avx512, Isa::avx2})
    if (isa_supported(isa)) return isa;
  return Isa::portable;
}

Isa isa_named(std::string_view name) {
  if (name == "portable") return Isa::portable;
  if (name == "avx2") return Isa::avx2;
  if (name == "avx512") return Isa::avx512;
  if (name == "amx") return Isa::amx;
  throw std::invalid_argument("unknown instruction set '" + std::string(name) +
                              "': portable, avx2, avx512 or amx");
}

}  // namespace

const Kernels& kernels_for(std::string_view name) {
  if (name.empty()) {
    const char* forced = std::getenv("PYSERVE_ISA");
    if (forced == nullptr || *forced == '\0') return table_of(best_isa());
    name = forced;
  }
  const Isa isa = isa_named(name);
  if (!isa_supported(isa)) throw std::invalid_argument("this processor lacks " + std::string(name));
  return table_of(isa);
}

}  // namespace pyserve
