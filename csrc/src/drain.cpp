// ac_drain and ac_write: images in memory become files, and their digests are taken beside.
//
// 1. The caller is the first writer; more writers are threads. Each takes the next file, reserves its space, writes it in
//    big blocks, cuts it to its length and syncs it. One writer with big direct blocks reaches the limit of most disks.
// 2. Digest threads walk over the spans at the same time, at a lower priority when asked: what they take from training
//    matters more than when they end.
// 3. Writers that find no file left help with the digests, so a starved digest thread delays nothing.
#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "asyncckpt.h"
#include "error.hpp"
#include "file_io.hpp"
#include "leaves.hpp"
#include "mapping.hpp"
#include "workers.hpp"

namespace asyncckpt {
namespace {

constexpr uint64_t block_bytes_default = 16 << 20;
constexpr uint32_t threads_max = 64;
// Behind a trainer on all cores, but not last: at 19 the digests of 2 GiB end 0.2 s after the writes and training loses
// no less.
constexpr int background_niceness = 5;

uint64_t bytes_of(const ac_file& file) {
  uint64_t bytes = 0;
  for (uint64_t index = 0; index < file.extents_count; ++index) bytes += file.extents[index].bytes;
  return bytes;
}

class Drain {
 public:
  Drain(const ac_file* files, uint64_t count, const ac_drain_options& options, uint64_t* bytes_done, Stop& stop)
      : files_(files), count_(count), sync_(options.sync != 0), bytes_done_(bytes_done), stop_(stop) {
    block_bytes_ = options.block_bytes == 0 ? block_bytes_default : round_up(options.block_bytes, AC_PAGE_BYTES);
  }

  void write_files() {
    for (;;) {
      const uint64_t item = next_.fetch_add(1);
      if (item >= count_ || stop_.requested()) return stop_.throw_if_cancelled();
      write_file(files_[item], item);
    }
  }

 private:
  void write_file(const ac_file& file, uint64_t item) {
    const bool direct = file.direct != 0;
    const uint64_t bytes = bytes_of(file);
    FileIo io(file.fd, direct, item);
    // Past the end of a direct file lies the rest of its last page, which is written and then cut off.
    reserve(file.fd, direct ? round_up(bytes, AC_PAGE_BYTES) : bytes, item);
    uint64_t offset = 0;
    for (uint64_t index = 0; index < file.extents_count; ++index) {
      if (!write_extent(io, file.extents[index], offset, direct)) return stop_.throw_if_cancelled();
      offset += file.extents[index].bytes;
    }
    finish(file, bytes, item);
  }

  // Write one extent at its place in the file; false when the drain was stopped.
  bool write_extent(FileIo& io, const ac_span& extent, uint64_t place, bool direct) {
    const uint64_t written_bytes = direct ? round_up(extent.bytes, AC_PAGE_BYTES) : extent.bytes;
    for (uint64_t offset = 0; offset < written_bytes; offset += block_bytes_) {
      if (stop_.requested()) return false;
      const uint64_t bytes = std::min(block_bytes_, written_bytes - offset);
      io.write(static_cast<const char*>(extent.data) + offset, bytes, place + offset);
      add_progress(bytes_done_, std::min(bytes, extent.bytes - offset));
    }
    return true;
  }

  void finish(const ac_file& file, uint64_t bytes, uint64_t item) {
    if (ftruncate(file.fd, static_cast<off_t>(bytes)) != 0) {
      throw Error(AC_SYSTEM, errno, item, "cannot cut file %llu to %llu bytes", static_cast<unsigned long long>(item),
                  static_cast<unsigned long long>(bytes));
    }
    // Only once: after a failed fsync the kernel may call the lost pages clean, and a second one would succeed.
    if (sync_ && fsync(file.fd) != 0) {
      throw Error(AC_SYSTEM, errno, item, "cannot sync file %llu", static_cast<unsigned long long>(item));
    }
  }

  // Blocks of a file that is reserved at once lie together, and a full disk is found out before anything is written.
  static void reserve(int fd, uint64_t bytes, uint64_t item) {
    if (bytes == 0) return;
    while (fallocate(fd, 0, 0, static_cast<off_t>(bytes)) != 0) {
      if (errno == EINTR) continue;
      if (errno != ENOSPC && errno != EDQUOT && errno != EFBIG && errno != EIO) return;  // Not offered here.
      throw Error(AC_SYSTEM, errno, item, "cannot reserve %llu bytes for file %llu",
                  static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(item));
    }
  }

  const ac_file* files_;
  uint64_t count_;
  uint64_t block_bytes_;
  bool sync_;
  uint64_t* bytes_done_;
  Stop& stop_;
  std::atomic<uint64_t> next_{0};
};

// Lower the priority of the calling thread; on Linux niceness belongs to threads. Refusals do no harm.
void step_back(uint32_t background) {
  if (background == 0) return;
  const sched_param none{};
  (void)sched_setscheduler(0, background == 2 ? SCHED_IDLE : SCHED_BATCH, &none);
  if (background == 1) (void)setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), background_niceness);
}

void require_sound(const ac_file& file) {
  require(file.extents_count == 0 || file.extents != nullptr, "a file has no extents");
  uint64_t bytes = 0;
  for (uint64_t index = 0; index < file.extents_count; ++index) {
    const ac_span& extent = file.extents[index];
    require(extent.bytes == 0 || extent.data != nullptr, "an extent has no data");
    require(extent.bytes < INT64_MAX - bytes, "a file is too long");
    bytes += extent.bytes;
    if (!file.direct || extent.bytes == 0) continue;
    require(reinterpret_cast<uintptr_t>(extent.data) % AC_PAGE_BYTES == 0, "an extent of a direct file is not aligned");
    require(index + 1 == file.extents_count || extent.bytes % AC_PAGE_BYTES == 0,
            "an extent of a direct file that is not its last one ends inside a page");
  }
}

}  // namespace
}  // namespace asyncckpt

extern "C" {

int32_t ac_drain(const ac_file* files, uint64_t files_count, const ac_span* spans, uint64_t spans_count,
                 uint8_t* digests, uint8_t* leaves, const ac_drain_options* options, uint64_t* bytes_done,
                 const int32_t* cancel, ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    require(files_count == 0 || files != nullptr, "files is NULL");
    require(spans_count == 0 || (spans != nullptr && digests != nullptr), "spans or digests is NULL");
    require(options != nullptr && options->background <= 2, "options is NULL or its background is unknown");
    for (uint64_t item = 0; item < files_count; ++item) require_sound(files[item]);
    Stop stop(cancel);
    Drain drain(files, files_count, *options, bytes_done, stop);
    LeafQueue queue(spans, spans_count);
    auto write = [&] { drain.write_files(); };
    auto digest = [&] {
      queue.work([&] { return stop.requested(); });
      stop.throw_if_cancelled();
    };
    {
      Workers workers(stop);
      const uint32_t digest_threads = std::clamp(options->digest_threads, 1u, threads_max);
      workers.start("asyncckpt-hash", spans_count == 0 ? 0 : digest_threads, [&] {
        step_back(options->background);
        digest();
      });
      workers.start("asyncckpt-write", std::clamp(options->writers, 1u, threads_max) - 1, [&] { write(), digest(); });
      workers.guarded([&] { write(), digest(); });
    }
    stop.rethrow();
    queue.join(digests, leaves);
  });
}

int32_t ac_write(int32_t fd, const void* data, uint64_t bytes, uint64_t offset, int32_t direct, ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    require(bytes == 0 || data != nullptr, "data is NULL");
    require(bytes < INT64_MAX && offset < INT64_MAX - bytes, "bytes or offset is out of range");
    const uint64_t crumbs = (reinterpret_cast<uintptr_t>(data) | bytes | offset) % AC_PAGE_BYTES;
    require(!direct || crumbs == 0, "a direct write needs data, bytes and offset in multiples of AC_PAGE_BYTES");
    FileIo(fd, direct != 0, 0).write(static_cast<const char*>(data), bytes, offset);
  });
}

}  // extern "C"
