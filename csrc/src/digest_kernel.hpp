// XXH3 in one variant per instruction set, chosen once. The library that we vendor picks its vector code when it is
// compiled, so each variant is the same source in another translation unit (digest_kernel_body.hpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu.hpp"

namespace asyncckpt {

constexpr size_t digest_state_bytes = 576;

// Streaming state of any variant; belongs to the variant that reset it.
struct alignas(64) DigestState {
  unsigned char bytes[digest_state_bytes];
};

struct DigestKernel {
  // All digests are 16 bytes, big-endian.
  void (*whole)(const void* data, size_t bytes, uint8_t* digest);
  void (*reset)(DigestState* state);
  void (*update)(DigestState* state, const void* data, size_t bytes);
  void (*end)(const DigestState* state, uint8_t* digest);
  // XXH3-64 of every row of `row_bytes` with its fingerprint as seed becomes its fingerprint.
  void (*chain_rows)(const char* rows, size_t row_bytes, size_t rows_count, uint64_t* fingerprints);
};

extern const DigestKernel digest_portable;
extern const DigestKernel digest_avx2;
extern const DigestKernel digest_avx512;

const DigestKernel& digest_kernel(CpuVariant variant) noexcept;
// The variant for this machine.
const DigestKernel& digest_kernel() noexcept;

}  // namespace asyncckpt
