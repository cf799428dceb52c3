#include "file_io.hpp"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

#include "error.hpp"

#ifndef RWF_DONTCACHE
#define RWF_DONTCACHE 0x80  // since Linux 6.14
#endif

namespace asyncckpt {
namespace {

constexpr uint64_t big_bytes_min = 1 << 20;

}  // namespace

ssize_t FileIo::write_some(const char* data, uint64_t bytes, uint64_t offset) {
  const off_t place = static_cast<off_t>(offset);
  if (direct_ || bytes < big_bytes_min) return pwrite(fd_, data, bytes, place);
  if (uncached_) {
    const iovec vector{const_cast<char*>(data), bytes};
    const ssize_t count = pwritev2(fd_, &vector, 1, place, RWF_DONTCACHE);
    if (count >= 0 || (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL)) return count;
    uncached_ = false;
  }
  const ssize_t count = pwrite(fd_, data, bytes, place);
  // The next best thing: start to write back at once. It is advice, so its failure is none.
  if (count > 0) (void)sync_file_range(fd_, place, count, SYNC_FILE_RANGE_WRITE);
  return count;
}

void FileIo::write(const char* data, uint64_t bytes, uint64_t offset) {
  while (bytes > 0) {
    const ssize_t count = write_some(data, bytes, offset);
    if (count > 0) {
      data += count, offset += static_cast<uint64_t>(count), bytes -= static_cast<uint64_t>(count);
      // A direct write that stopped inside a page cannot go on from there.
      if (direct_ && bytes > 0 && count % AC_PAGE_BYTES != 0) clear_direct();
      continue;
    }
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EINVAL && direct_) {
      clear_direct();
      continue;
    }
    const int reason = count < 0 ? errno : EIO;
    throw Error(AC_SYSTEM, reason, item_, "cannot write %llu bytes at offset %llu of file %llu",
                static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(offset),
                static_cast<unsigned long long>(item_));
  }
}

uint64_t FileIo::read(char* target, uint64_t needed, uint64_t room, uint64_t offset) {
  uint64_t done = 0;
  while (done < needed) {
    const ssize_t count = pread(fd_, target + done, room - done, static_cast<off_t>(offset + done));
    if (count == 0) break;
    if (count > 0) {
      done += static_cast<uint64_t>(count);
      // Most often this is the end of the file; a buffered read finds out.
      if (direct_ && done < needed && count % AC_PAGE_BYTES != 0) clear_direct();
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EINVAL && direct_) {
      clear_direct();
      continue;
    }
    throw Error(AC_SYSTEM, errno, item_, "cannot read %llu bytes at offset %llu",
                static_cast<unsigned long long>(room - done), static_cast<unsigned long long>(offset + done));
  }
  return done;
}

void FileIo::clear_direct() {
  const int flags = fcntl(fd_, F_GETFL);
  if (flags < 0 || fcntl(fd_, F_SETFL, flags & ~O_DIRECT) != 0) {
    throw Error(AC_SYSTEM, errno, item_, "cannot turn off O_DIRECT");
  }
  direct_ = false;
}

}  // namespace asyncckpt
