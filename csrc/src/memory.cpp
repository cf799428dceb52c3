// ac_memory_*: the memory of staging arenas.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "asyncckpt.h"
#include "error.hpp"
#include "mapping.hpp"
#include "thread_pool.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace asyncckpt {
namespace {

constexpr uint64_t grain_bytes = 32 << 20;

// For kernels before 5.14. Adding nothing stores to the page and keeps what another thread may have stored.
void touch_by_store(char* begin, char* end) {
  for (char* page = begin; page < end; page += AC_PAGE_BYTES) __atomic_fetch_add(page, 0, __ATOMIC_RELAXED);
}

void touch(char* begin, char* end) {
  while (madvise(begin, static_cast<size_t>(end - begin), MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno == EINVAL) return touch_by_store(begin, end);
    const ac_status status = errno == ENOMEM ? AC_NO_MEMORY : AC_SYSTEM;
    throw Error(status, errno, 0, "cannot fault in %zu bytes", static_cast<size_t>(end - begin));
  }
}

void touch_parallel(char* begin, char* end, uint32_t threads) {
  const uint64_t bytes = static_cast<uint64_t>(end - begin);
  std::atomic<uint64_t> next{0};
  FirstFailure failure;
  auto work = [&] {
    try {
      while (!failure.any()) {
        const uint64_t offset = next.fetch_add(grain_bytes);
        if (offset >= bytes) return;
        touch(begin + offset, begin + std::min(offset + grain_bytes, bytes));
      }
    } catch (...) {
      failure.keep_current();
    }
  };
  ThreadPool::instance().run(bytes > grain_bytes ? threads : 1, work);
  failure.rethrow();
}

}  // namespace
}  // namespace asyncckpt

extern "C" {

int32_t ac_memory_map(uint64_t bytes, void** base, ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    require(bytes > 0 && bytes < INT64_MAX, "bytes is out of range");
    require(base != nullptr, "base is NULL");
    const uint64_t rounded = round_up(bytes, huge_page_bytes);
    *base = map_aligned(rounded);
    (void)madvise(*base, rounded, MADV_DONTFORK);
  });
}

int32_t ac_memory_resize(void* base, uint64_t old_bytes, uint64_t new_bytes, void** new_base, ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    require(base != nullptr && new_base != nullptr, "base or new_base is NULL");
    require(old_bytes > 0 && new_bytes > 0 && new_bytes < INT64_MAX, "old_bytes or new_bytes is out of range");
    *new_base = remap_aligned(base, round_up(old_bytes, huge_page_bytes), round_up(new_bytes, huge_page_bytes));
  });
}

int32_t ac_memory_touch(void* base, uint64_t begin, uint64_t end, uint32_t threads, ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    require(base != nullptr && begin <= end, "base is NULL or begin lies behind end");
    char* start = static_cast<char*>(base);
    if (begin < end) touch_parallel(start + round_down(begin, AC_PAGE_BYTES), start + round_up(end, AC_PAGE_BYTES), threads);
  });
}

void ac_memory_advise_huge(void* data, uint64_t bytes) {
  using namespace asyncckpt;
  // Only huge pages that lie wholly inside: what is beside may belong to others.
  const uint64_t begin = round_up(reinterpret_cast<uintptr_t>(data), huge_page_bytes);
  const uint64_t end = round_down(reinterpret_cast<uintptr_t>(data) + bytes, huge_page_bytes);
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

int32_t ac_memory_unmap(void* base, uint64_t bytes, ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    require(base != nullptr && bytes > 0, "base is NULL or bytes is zero");
    unmap(base, round_up(bytes, huge_page_bytes));
  });
}

}  // extern "C"
