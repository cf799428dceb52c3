#include "file_io.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "error.hpp"

namespace asyncckpt {

void FileIo::write(const char* data, uint64_t bytes, uint64_t offset) {
  while (bytes > 0) {
    const ssize_t count = pwrite(fd_, data, bytes, static_cast<off_t>(offset));
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
