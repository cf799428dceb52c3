// ac_digest and ac_digester_*: digests of memory, at once and as it comes.
#include <algorithm>
#include <new>
#include <vector>

#include "asyncckpt.h"
#include "digest_kernel.hpp"
#include "error.hpp"
#include "leaves.hpp"
#include "thread_pool.hpp"

namespace asyncckpt {

const DigestKernel& digest_kernel(CpuVariant variant) noexcept {
#if defined(__x86_64__)
  if (variant == CpuVariant::avx512) return digest_avx512;
  if (variant == CpuVariant::avx2) return digest_avx2;
#endif
  (void)variant;
  return digest_portable;
}

const DigestKernel& digest_kernel() noexcept { return digest_kernel(cpu_variant()); }

}  // namespace asyncckpt

// The leaf that is open, and the digests of the leaves before it.
struct ac_digester {
  const asyncckpt::DigestKernel& kernel = asyncckpt::digest_kernel();
  asyncckpt::DigestState leaf;
  std::vector<uint8_t> leaves;
  uint64_t leaf_bytes = 0;

  ac_digester() { restart(); }

  void restart() {
    kernel.reset(&leaf);
    leaves.clear();
    leaf_bytes = 0;
  }

  void end_leaf() {
    kernel.end(&leaf, leaves.data() + leaves.size() - AC_DIGEST_BYTES);
    kernel.reset(&leaf);
    leaf_bytes = 0;
  }
};

extern "C" {

int32_t ac_digest(const ac_span* spans, uint64_t count, uint8_t* digests, uint8_t* leaves, uint32_t threads,
                  ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    require(count == 0 || (spans != nullptr && digests != nullptr), "spans or digests is NULL");
    LeafQueue queue(spans, count);
    auto work = [&] { queue.work([] { return false; }); };
    ThreadPool::instance().run(threads, work);
    queue.join(digests, leaves);
  });
}

ac_digester* ac_digester_new(void) { return new (std::nothrow) ac_digester; }

int32_t ac_digester_update(ac_digester* digester, const void* data, uint64_t bytes, ac_error* error) {
  return asyncckpt::at_border(error, [&] {
    const char* next = static_cast<const char*>(data);
    while (bytes > 0) {
      // Room for its digest first: ending it cannot fail.
      if (digester->leaf_bytes == 0) digester->leaves.resize(digester->leaves.size() + AC_DIGEST_BYTES);
      const uint64_t taken = std::min(bytes, AC_LEAF_BYTES - digester->leaf_bytes);
      digester->kernel.update(&digester->leaf, next, taken);
      digester->leaf_bytes += taken;
      next += taken, bytes -= taken;
      if (digester->leaf_bytes == AC_LEAF_BYTES) digester->end_leaf();
    }
  });
}

void ac_digester_end(ac_digester* digester, uint8_t* digest, uint8_t* leaves) {
  if (digester->leaf_bytes > 0) digester->end_leaf();
  digester->kernel.whole(digester->leaves.data(), digester->leaves.size(), digest);
  if (leaves != nullptr) std::copy(digester->leaves.begin(), digester->leaves.end(), leaves);
  digester->restart();
}

void ac_digester_free(ac_digester* digester) { delete digester; }

}  // extern "C"
