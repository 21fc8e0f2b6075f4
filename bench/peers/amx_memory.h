// For building llama.cpp with GCC 12, whose optimiser knows neither all 64 bytes that
// _tile_loadconfig reads nor what tile loads read: it drops the stores before them, and products by
// AMX crash.
#pragma once

#if defined(__AMX_TILE__)
#include <immintrin.h>

#undef _tile_loadconfig
#define _tile_loadconfig(config) \
  __asm__ volatile("ldtilecfg %0" ::"m"(*(const char (*)[64])(config)) : "memory")
#undef _tile_loadd
#define _tile_loadd(tile, base, stride) pyserve_tile_loadd(tile, base, stride)
#define pyserve_tile_loadd(tile, base, stride)                                    \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)), \
                   "r"((long)(stride))                                            \
                   : "memory")
#endif
