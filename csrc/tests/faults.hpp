// System calls that fail when a test says so. The linker sends the core's calls to faults.cpp (--wrap).
#pragma once

#include <cstddef>
#include <cstdint>

enum class Call { fallocate, fsync, ftruncate, mmap, mremap, pread, pwrite, pwritev2, count };

// While it lives, calls behave as told. One at a time.
class Fault {
 public:
  // Calls number [first, first + times) of this kind fail with `reason`.
  static Fault failing(Call call, int reason, uint64_t first = 0, uint64_t times = UINT64_MAX);
  // Every read or write moves at most `bytes`.
  static Fault shortened(Call call, size_t bytes);
  ~Fault();
  Fault(const Fault&) = delete;
  Fault& operator=(const Fault&) = delete;

  static uint64_t calls(Call call);

 private:
  Fault() = default;
};
