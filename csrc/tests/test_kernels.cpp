// Every copy and digest kernel that this processor runs does the same as the plain one.
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "copy_kernel.hpp"
#include "digest_kernel.hpp"
#include "leaves.hpp"

using namespace asyncckpt;

namespace {

std::vector<char> random_bytes(size_t count) {
  std::mt19937_64 random(count);
  std::vector<char> bytes(count);
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

bool runs_here(CpuVariant variant) { return variant <= cpu_variant(); }

void check_copy(CopyKernel kernel) {
  constexpr size_t room = 80'000, margin = 128;
  const std::vector<char> source = random_bytes(room + margin);
  const std::vector<char> blank(room + margin, 'x');
  for (const size_t bytes : {0, 1, 63, 64, 65, 127, 128, 255, 256, 319, 320, 511, 4095, 4096, 4097, 16383, 16384, 16385, 20480, 70001}) {
    for (const size_t source_at : {0, 1, 63}) {
      for (const size_t target_at : {0, 1, 17, 64}) {
        std::vector<char> target = blank, expected = blank;
        std::memcpy(expected.data() + target_at, source.data() + source_at, bytes);
        kernel(target.data() + target_at, source.data() + source_at, bytes);
        copy_fence();
        CHECK(target == expected);
      }
    }
  }
}

using Digest = std::string;

Digest whole_digest(const DigestKernel& kernel, const std::vector<char>& data) {
  uint8_t digest[AC_DIGEST_BYTES];
  kernel.whole(data.data(), data.size(), digest);
  return Digest(reinterpret_cast<char*>(digest), sizeof digest);
}

Digest pieced_digest(const DigestKernel& kernel, const std::vector<char>& data, size_t piece) {
  uint8_t digest[AC_DIGEST_BYTES];
  DigestState state;
  kernel.reset(&state);
  for (size_t at = 0; at < data.size(); at += piece) kernel.update(&state, data.data() + at, std::min(piece, data.size() - at));
  kernel.end(&state, digest);
  return Digest(reinterpret_cast<char*>(digest), sizeof digest);
}

}  // namespace

TEST(copy_kernels_copy_every_byte_and_no_other) {
  check_copy(copy_portable);
  check_copy(copy_way().kernel);
#if defined(__x86_64__)
  if (runs_here(CpuVariant::avx2)) check_copy(copy_avx2_interleaved), check_copy(copy_avx2_sequential);
  if (runs_here(CpuVariant::avx512)) check_copy(copy_avx512_interleaved), check_copy(copy_avx512_sequential);
#endif
}

TEST(digest_kernels_agree) {
  for (const CpuVariant variant : {CpuVariant::portable, CpuVariant::avx2, CpuVariant::avx512}) {
    if (!runs_here(variant)) continue;
    const DigestKernel& kernel = digest_kernel(variant);
    for (const size_t bytes : {0, 1, 16, 17, 128, 129, 240, 241, 1024, 1025, 100'003}) {
      const std::vector<char> data = random_bytes(bytes);
      CHECK(whole_digest(kernel, data) == whole_digest(digest_portable, data));
      CHECK(pieced_digest(kernel, data, 1000) == whole_digest(digest_portable, data));
    }
  }
}

TEST(digest_of_nothing_is_known) {
  // XXH3-128 of no bytes with seed 0, from the reference implementation.
  const Digest digest = whole_digest(digest_kernel(), {});
  CHECK(digest == Digest("\x99\xaa\x06\xd3\x01\x47\x98\xd8\x60\x01\xc3\x24\x46\x8d\x49\x7f", 16));
}
