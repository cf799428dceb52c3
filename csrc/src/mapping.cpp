#include "mapping.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "error.hpp"

namespace asyncckpt {
namespace {

[[noreturn]] void fail(const char* what, size_t bytes) {
  if (errno == ENOMEM) throw Error(AC_NO_MEMORY, ENOMEM, 0, "cannot %s %zu bytes", what, bytes);
  throw Error(AC_SYSTEM, errno, 0, "cannot %s %zu bytes", what, bytes);
}

void* map_anywhere(size_t bytes, int protection) {
  void* base = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) fail("map", bytes);
  return base;
}

// Older kernels align a mapping to small pages only, so map a huge page more and give the ends back.
char* map_huge_aligned(size_t bytes, int protection) {
  const size_t wide = bytes + huge_page_bytes;
  char* begin = static_cast<char*>(map_anywhere(wide, protection));
  char* aligned = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(begin), huge_page_bytes));
  if (aligned > begin) munmap(begin, static_cast<size_t>(aligned - begin));
  char* end = aligned + bytes;
  if (end < begin + wide) munmap(end, static_cast<size_t>(begin + wide - end));
  return aligned;
}

// A kernel without huge pages refuses the advice and works all the same.
void advise_huge(void* base, size_t bytes) { (void)madvise(base, bytes, MADV_HUGEPAGE); }

void require_possible(size_t bytes) {
  if (bytes > SIZE_MAX / 4) throw Error(AC_NO_MEMORY, 0, 0, "cannot map %zu bytes", bytes);
}

}  // namespace

void* map_aligned(size_t bytes) {
  require_possible(bytes);
  if (bytes < huge_page_bytes) return map_anywhere(bytes, PROT_READ | PROT_WRITE);
  void* base = map_huge_aligned(bytes, PROT_READ | PROT_WRITE);
  advise_huge(base, bytes);
  return base;
}

void* remap_aligned(void* base, size_t old_bytes, size_t new_bytes) {
  require_possible(new_bytes);
  const int move = new_bytes < huge_page_bytes ? MREMAP_MAYMOVE : 0;
  void* moved = old_bytes < huge_page_bytes && move == 0 ? MAP_FAILED : mremap(base, old_bytes, new_bytes, move);
  if (moved != MAP_FAILED) return moved;
  if (new_bytes < old_bytes) fail("resize to", new_bytes);
  // Moving to an aligned place keeps the huge pages whole; moving anywhere else would split them.
  char* place = map_huge_aligned(new_bytes, PROT_NONE);
  moved = mremap(base, old_bytes, new_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place);
  if (moved == MAP_FAILED) {
    const int reason = errno;
    munmap(place, new_bytes);
    errno = reason;
    fail("resize to", new_bytes);
  }
  advise_huge(moved, new_bytes);
  return moved;
}

void unmap(void* base, size_t bytes) {
  if (munmap(base, bytes) != 0) fail("unmap", bytes);
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void Mapping::grow(size_t bytes) {
  const size_t rounded = mapped_bytes(bytes);
  base_ = base_ == nullptr ? map_aligned(rounded) : remap_aligned(base_, bytes_, rounded);
  bytes_ = rounded;
}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

}  // namespace asyncckpt
