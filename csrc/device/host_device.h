// What may run on either side: bodies marked so are compiled for CUDA's threads and, the same
// source, for the CPU, where the tests reach them.
#pragma once

#ifdef __CUDACC__
#define PYSERVE_HOST_DEVICE __host__ __device__
#else
#define PYSERVE_HOST_DEVICE
#endif
