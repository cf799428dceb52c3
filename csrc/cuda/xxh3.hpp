// XXH3 of 64 bits with a seed, for one thread, after its specification (github.com/Cyan4973/xxHash,
// doc/xxhash_spec.md).
//
// The input is aligned to a power of two that the caller knows, and every load keeps to it. The secret of an input
// longer than 240 bytes depends on the seed; it is computed where it is needed and never stored.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace asyncckpt::cuda {

// The default secret of 192 bytes as little-endian words.
constexpr unsigned xxh3_secret_words = 24;
static __constant__ const uint64_t xxh3_secret[xxh3_secret_words] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull, 0x78e5c0cc4ee679cbull,
    0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull, 0xcb00c391bb52283cull, 0xa32e531b8b65d088ull,
    0x4ef90da297486471ull, 0xd8acdea946ef1938ull, 0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull,
    0x647378d9c97e9fc8ull, 0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

template <unsigned alignment>
class Xxh3 {
 public:
  __device__ static uint64_t hash(const char* input, uint64_t bytes, uint64_t seed) {
    if (bytes > 240) return hash_long(input, bytes, seed);
    if (bytes > 128) return hash_129_to_240(input, bytes, seed);
    if (bytes > 16) return hash_17_to_128(input, bytes, seed);
    if (bytes > 8) return hash_9_to_16(input, bytes, seed);
    if (bytes > 3) return hash_4_to_8(input, bytes, seed);
    if (bytes > 0) return hash_1_to_3(input, bytes, seed);
    return avalanche_xxh64(seed ^ secret(56) ^ secret(64));
  }

 private:
  static constexpr uint64_t prime32_1 = 0x9E3779B1, prime32_2 = 0x85EBCA77, prime32_3 = 0xC2B2AE3D;
  static constexpr uint64_t prime64_1 = 0x9E3779B185EBCA87, prime64_2 = 0xC2B2AE3D27D4EB4F;
  static constexpr uint64_t prime64_3 = 0x165667B19E3779F9, prime64_4 = 0x85EBCA77C2B2AE63;
  static constexpr uint64_t prime64_5 = 0x27D4EB2F165667C5;
  static constexpr uint64_t mix_1 = 0x165667919E3779F9, mix_2 = 0x9FB21C651E98DF25;

  static constexpr unsigned lanes = 8;
  static constexpr uint64_t stripe_bytes = 64;
  static constexpr uint64_t block_stripes = 16;

  __device__ static uint32_t read32(const char* from) {
    if constexpr (alignment >= 4) return *reinterpret_cast<const uint32_t*>(from);
    uint32_t word = 0;
    for (unsigned at = 0; at < 4; ++at) word |= uint32_t{static_cast<unsigned char>(from[at])} << (8 * at);
    return word;
  }

  __device__ static uint64_t read64(const char* from) {
    if constexpr (alignment >= 8) return *reinterpret_cast<const uint64_t*>(from);
    return read32(from) | static_cast<uint64_t>(read32(from + 4)) << 32;
  }

  __device__ static ulonglong2 read128(const char* from) {
    if constexpr (alignment >= 16) return *reinterpret_cast<const ulonglong2*>(from);
    return make_ulonglong2(read64(from), read64(from + 8));
  }

  // 8 bytes of the secret from any offset on.
  __device__ static uint64_t secret(unsigned offset) { return secret_for(offset, 0); }

  // The same of the secret that belongs to a seed: its even words have the seed added, its odd ones subtracted.
  __device__ static uint64_t secret_for(unsigned offset, uint64_t seed) {
    const unsigned word = offset / 8, shift = offset % 8 * 8;
    if (shift == 0) return seeded_word(word, seed);
    return seeded_word(word, seed) >> shift | seeded_word(word + 1, seed) << (64 - shift);
  }

  __device__ static uint64_t seeded_word(unsigned word, uint64_t seed) {
    return word % 2 == 0 ? xxh3_secret[word] + seed : xxh3_secret[word] - seed;
  }

  __device__ static uint64_t rotate(uint64_t value, unsigned bits) { return value << bits | value >> (64 - bits); }
  __device__ static uint32_t swap(uint32_t value) {
    return value << 24 | (value << 8 & 0xFF0000) | (value >> 8 & 0xFF00) | value >> 24;
  }
  __device__ static uint64_t swap(uint64_t value) {
    return static_cast<uint64_t>(swap(static_cast<uint32_t>(value))) << 32 | swap(static_cast<uint32_t>(value >> 32));
  }
  __device__ static uint64_t fold(uint64_t left, uint64_t right) { return left * right ^ __umul64hi(left, right); }

  __device__ static uint64_t avalanche_xxh64(uint64_t hash) {
    hash = (hash ^ hash >> 33) * prime64_2;
    hash = (hash ^ hash >> 29) * prime64_3;
    return hash ^ hash >> 32;
  }

  __device__ static uint64_t avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 37) * mix_1;
    return hash ^ hash >> 32;
  }

  __device__ static uint64_t hash_1_to_3(const char* input, uint64_t bytes, uint64_t seed) {
    const uint32_t first = static_cast<unsigned char>(input[0]);
    const uint32_t middle = static_cast<unsigned char>(input[bytes >> 1]);
    const uint32_t last = static_cast<unsigned char>(input[bytes - 1]);
    const uint32_t combined = first << 16 | middle << 24 | last | static_cast<uint32_t>(bytes) << 8;
    const uint32_t flip = static_cast<uint32_t>(xxh3_secret[0]) ^ static_cast<uint32_t>(xxh3_secret[0] >> 32);
    return avalanche_xxh64(combined ^ (flip + seed));
  }

  __device__ static uint64_t hash_4_to_8(const char* input, uint64_t bytes, uint64_t seed) {
    seed ^= static_cast<uint64_t>(swap(static_cast<uint32_t>(seed))) << 32;
    const uint64_t flip = (secret(8) ^ secret(16)) - seed;
    const uint64_t word = read32(input + bytes - 4) + (static_cast<uint64_t>(read32(input)) << 32);
    uint64_t hash = word ^ flip;
    hash = (hash ^ rotate(hash, 49) ^ rotate(hash, 24)) * mix_2;
    hash = (hash ^ ((hash >> 35) + bytes)) * mix_2;
    return hash ^ hash >> 28;
  }

  __device__ static uint64_t hash_9_to_16(const char* input, uint64_t bytes, uint64_t seed) {
    const uint64_t low = read64(input) ^ ((secret(24) ^ secret(32)) + seed);
    const uint64_t high = read64(input + bytes - 8) ^ ((secret(40) ^ secret(48)) - seed);
    return avalanche(bytes + swap(low) + high + fold(low, high));
  }

  __device__ static uint64_t mix(const char* input, unsigned offset, uint64_t seed) {
    const ulonglong2 words = read128(input);
    return fold(words.x ^ (secret(offset) + seed), words.y ^ (secret(offset + 8) - seed));
  }

  __device__ static uint64_t hash_17_to_128(const char* input, uint64_t bytes, uint64_t seed) {
    uint64_t hash = bytes * prime64_1;
    // From the outside to the middle, a pair of 16 bytes for every 32.
    const unsigned pairs = static_cast<unsigned>((bytes - 1) / 32) + 1;
    for (unsigned pair = 0; pair < pairs; ++pair) {
      hash += mix(input + 16 * pair, 32 * pair, seed);
      hash += mix(input + bytes - 16 * (pair + 1), 32 * pair + 16, seed);
    }
    return avalanche(hash);
  }

  __device__ static uint64_t hash_129_to_240(const char* input, uint64_t bytes, uint64_t seed) {
    uint64_t hash = bytes * prime64_1;
    for (unsigned part = 0; part < 8; ++part) hash += mix(input + 16 * part, 16 * part, seed);
    hash = avalanche(hash);
    for (unsigned part = 8; part < bytes / 16; ++part) hash += mix(input + 16 * part, 16 * (part - 8) + 3, seed);
    return avalanche(hash + mix(input + bytes - 16, 136 - 17, seed));
  }

  // `offset` is that of the secret.
  __device__ static void accumulate(uint64_t (&sums)[lanes], const char* stripe, unsigned offset, uint64_t seed) {
#pragma unroll
    for (unsigned lane = 0; lane < lanes; lane += 2) {
      const ulonglong2 words = read128(stripe + 8 * lane);
      const uint64_t even = words.x ^ secret_for(offset + 8 * lane, seed);
      const uint64_t odd = words.y ^ secret_for(offset + 8 * lane + 8, seed);
      sums[lane] += words.y + (even & 0xFFFFFFFF) * (even >> 32);
      sums[lane + 1] += words.x + (odd & 0xFFFFFFFF) * (odd >> 32);
    }
  }

  __device__ static uint64_t hash_long(const char* input, uint64_t bytes, uint64_t seed) {
    uint64_t sums[lanes] = {prime32_3, prime64_1, prime64_2, prime64_3, prime64_4, prime32_2, prime64_5, prime32_1};
    // The last stripe ends with the input and may reach into the one before; it is none of these.
    const uint64_t stripes = (bytes - 1) / stripe_bytes;
    for (uint64_t stripe = 0; stripe < stripes; ++stripe) {
      const unsigned place = static_cast<unsigned>(stripe % block_stripes);
      accumulate(sums, input + stripe * stripe_bytes, 8 * place, seed);
      if (place != block_stripes - 1) continue;
#pragma unroll
      for (unsigned lane = 0; lane < lanes; ++lane) {
        const uint64_t key = secret_for(8 * xxh3_secret_words - stripe_bytes + 8 * lane, seed);
        sums[lane] = (sums[lane] ^ sums[lane] >> 47 ^ key) * prime32_1;
      }
    }
    accumulate(sums, input + bytes - stripe_bytes, 8 * xxh3_secret_words - stripe_bytes - 7, seed);
    uint64_t hash = bytes * prime64_1;
#pragma unroll
    for (unsigned lane = 0; lane < lanes; lane += 2) {
      const unsigned offset = 11 + 8 * lane;
      hash += fold(sums[lane] ^ secret_for(offset, seed), sums[lane + 1] ^ secret_for(offset + 8, seed));
    }
    return avalanche(hash);
  }
};

}  // namespace asyncckpt::cuda
