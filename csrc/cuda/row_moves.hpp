// How a piece of a row is taken from its source and put into its target: one class for each width, and for the cast.
//
// A row is `count` pieces of source_bytes each, which become pieces of target_bytes.
#pragma once

#include "vectors.hpp"

namespace asyncckpt::cuda {

template <class Vector>
struct AsIs {
  using Held = Vector;
  static constexpr unsigned source_bytes = sizeof(Vector);
  static constexpr unsigned target_bytes = sizeof(Vector);
  __device__ static Held take(const char* source) { return load<Vector>(source); }
  __device__ static void put(char* target, const Held& held) { store(target, held); }
};

// The bits of a float32 as those of the nearest bfloat16, of the even one of two; any NaN as the one that devices make.
__host__ __device__ inline uint32_t bfloat16_of(uint32_t bits) {
  constexpr uint32_t infinity = 0x7F800000, nan = 0x7FFF;
  if ((bits & 0x7FFFFFFF) > infinity) return nan;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

struct ToBfloat16 {
  using Held = unsigned int;
  static constexpr unsigned source_bytes = 4;
  static constexpr unsigned target_bytes = 2;
  __device__ static Held take(const char* source) { return load<unsigned int>(source); }
  __device__ static void put(char* target, const Held& held) {
    store(target, static_cast<unsigned short>(bfloat16_of(held)));
  }
};

// Four at once; the source is aligned to 16, the target to 8.
struct ToBfloat16Vector {
  using Held = uint4;
  static constexpr unsigned source_bytes = 16;
  static constexpr unsigned target_bytes = 8;
  __device__ static Held take(const char* source) { return load<uint4>(source); }
  __device__ static void put(char* target, const Held& held) {
    store(target, make_uint2(bfloat16_of(held.x) | bfloat16_of(held.y) << 16,
                             bfloat16_of(held.z) | bfloat16_of(held.w) << 16));
  }
};

}  // namespace asyncckpt::cuda
