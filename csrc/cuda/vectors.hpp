// Loads and stores of 1 to 16 bytes, and how wide they may be.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace asyncckpt::cuda {

constexpr unsigned vector_bytes_max = 16;

// The widest vector to which every number is aligned whose bits are in `bits`: addresses and strides, or'ed together.
__host__ __device__ inline unsigned vector_bytes_of(uint64_t bits) {
  bits |= vector_bytes_max;
  return static_cast<unsigned>(bits & (~bits + 1));
}

// What is copied is not needed again soon, so it leaves the cache first.

template <class Vector>
__device__ inline Vector load(const char* address) {
  return __ldcs(reinterpret_cast<const Vector*>(address));
}

template <class Vector>
__device__ inline void store(char* address, const Vector& value) {
  __stcs(reinterpret_cast<Vector*>(address), value);
}

}  // namespace asyncckpt::cuda
