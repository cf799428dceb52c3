#include "faults.hpp"

#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>

namespace {

struct Plan {
  int reason = 0;
  uint64_t first = 0;
  uint64_t times = 0;
  size_t bytes_max = SIZE_MAX;
  std::atomic<uint64_t> calls{0};
};

Plan plans[static_cast<size_t>(Call::count)];

Plan& plan_of(Call call) { return plans[static_cast<size_t>(call)]; }

// Count the call and say whether it fails.
bool fails(Call call) {
  Plan& plan = plan_of(call);
  const uint64_t number = plan.calls.fetch_add(1);
  if (plan.reason == 0 || number < plan.first || number - plan.first >= plan.times) return false;
  errno = plan.reason;
  return true;
}

}  // namespace

Fault Fault::failing(Call call, int reason, uint64_t first, uint64_t times) {
  Plan& plan = plan_of(call);
  plan.reason = reason, plan.first = first, plan.times = times, plan.calls = 0;
  return Fault();
}

Fault Fault::shortened(Call call, size_t bytes) {
  plan_of(call).bytes_max = bytes, plan_of(call).calls = 0;
  return Fault();
}

Fault::~Fault() {
  for (Plan& plan : plans) plan.reason = 0, plan.bytes_max = SIZE_MAX;
}

uint64_t Fault::calls(Call call) { return plan_of(call).calls; }

extern "C" {

int __real_fallocate(int fd, int mode, off_t offset, off_t bytes);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t bytes) {
  return fails(Call::fallocate) ? -1 : __real_fallocate(fd, mode, offset, bytes);
}

int __real_fsync(int fd);
int __wrap_fsync(int fd) { return fails(Call::fsync) ? -1 : __real_fsync(fd); }

int __real_ftruncate(int fd, off_t bytes);
int __wrap_ftruncate(int fd, off_t bytes) { return fails(Call::ftruncate) ? -1 : __real_ftruncate(fd, bytes); }

void* __real_mmap(void* place, size_t bytes, int protection, int flags, int fd, off_t offset);
void* __wrap_mmap(void* place, size_t bytes, int protection, int flags, int fd, off_t offset) {
  return fails(Call::mmap) ? MAP_FAILED : __real_mmap(place, bytes, protection, flags, fd, offset);
}

void* __real_mremap(void* old, size_t old_bytes, size_t bytes, int flags, ...);
void* __wrap_mremap(void* old, size_t old_bytes, size_t bytes, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  void* place = (flags & MREMAP_FIXED) != 0 ? va_arg(arguments, void*) : nullptr;
  va_end(arguments);
  return fails(Call::mremap) ? MAP_FAILED : __real_mremap(old, old_bytes, bytes, flags, place);
}

ssize_t __real_pread(int fd, void* target, size_t bytes, off_t offset);
ssize_t __wrap_pread(int fd, void* target, size_t bytes, off_t offset) {
  if (fails(Call::pread)) return -1;
  return __real_pread(fd, target, std::min(bytes, plan_of(Call::pread).bytes_max), offset);
}

ssize_t __real_pwrite(int fd, const void* data, size_t bytes, off_t offset);
ssize_t __wrap_pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  if (fails(Call::pwrite)) return -1;
  return __real_pwrite(fd, data, std::min(bytes, plan_of(Call::pwrite).bytes_max), offset);
}

ssize_t __real_pwritev2(int fd, const iovec* vectors, int count, off_t offset, int flags);
ssize_t __wrap_pwritev2(int fd, const iovec* vectors, int count, off_t offset, int flags) {
  return fails(Call::pwritev2) ? -1 : __real_pwritev2(fd, vectors, count, offset, flags);
}

}  // extern "C"
