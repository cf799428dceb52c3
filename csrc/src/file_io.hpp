// Whole writes and reads at an offset, over what pwrite and pread really do: stop early, be interrupted, refuse O_DIRECT.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace asyncckpt {

// One open file during a call. It stops being direct for good when the file system refuses. Then, and when it never was
// direct, big writes do not stay in the page cache: dirty pages that pile up until fsync cost ten times the CPU.
class FileIo {
 public:
  FileIo(int fd, bool direct, uint64_t item) : fd_(fd), direct_(direct), item_(item) {}

  bool direct() const { return direct_; }
  // Throw Error with AC_SYSTEM.
  void write(const char* data, uint64_t bytes, uint64_t offset);
  // Read at least `needed` bytes unless the file ends before; `room` >= needed is what may be read. Returns the count.
  uint64_t read(char* target, uint64_t needed, uint64_t room, uint64_t offset);

 private:
  ssize_t write_some(const char* data, uint64_t bytes, uint64_t offset);
  void clear_direct();

  int fd_;
  bool direct_;
  bool uncached_ = true;  // the kernel takes RWF_DONTCACHE
  uint64_t item_;
};

}  // namespace asyncckpt
