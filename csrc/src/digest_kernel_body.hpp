// The body of every digest_<variant>.cpp; the including file defines ASYNCCKPT_DIGEST_KERNEL and XXH_VECTOR.
#pragma once

#define XXH_INLINE_ALL
#include "../third_party/xxhash.h"
#include "digest_kernel.hpp"

namespace asyncckpt {
namespace {

static_assert(sizeof(XXH3_state_t) <= digest_state_bytes && alignof(XXH3_state_t) <= alignof(DigestState));

XXH3_state_t* state_of(DigestState* state) { return reinterpret_cast<XXH3_state_t*>(state->bytes); }
const XXH3_state_t* state_of(const DigestState* state) { return reinterpret_cast<const XXH3_state_t*>(state->bytes); }

void store(XXH128_hash_t hash, uint8_t* digest) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  for (size_t index = 0; index < sizeof canonical.digest; ++index) digest[index] = canonical.digest[index];
}

void whole(const void* data, size_t bytes, uint8_t* digest) { store(XXH3_128bits(data, bytes), digest); }
void reset(DigestState* state) { (void)XXH3_128bits_reset(state_of(state)); }
void update(DigestState* state, const void* data, size_t bytes) {
  (void)XXH3_128bits_update(state_of(state), data, bytes);
}
void end(const DigestState* state, uint8_t* digest) { store(XXH3_128bits_digest(state_of(state)), digest); }
void chain_rows(const char* rows, size_t row_bytes, size_t rows_count, uint64_t* fingerprints) {
  for (size_t row = 0; row < rows_count; ++row) {
    fingerprints[row] = XXH3_64bits_withSeed(rows + row * row_bytes, row_bytes, fingerprints[row]);
  }
}

}  // namespace

const DigestKernel ASYNCCKPT_DIGEST_KERNEL{whole, reset, update, end, chain_rows};

}  // namespace asyncckpt
