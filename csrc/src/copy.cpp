// ac_copy: hand out grains of the segments to the pool's threads and run the copy kernel on them.
#include <algorithm>
#include <cstring>
#include <mutex>

#include "asyncckpt.h"
#include "copy_kernel.hpp"
#include "error.hpp"
#include "thread_pool.hpp"

namespace asyncckpt {
namespace {

constexpr uint64_t grain_bytes = 1 << 20;
constexpr uint64_t grain_segments_max = 1024;
// A smaller copy is over before another thread wakes up.
constexpr uint64_t parallel_bytes_min = 1 << 20;

struct Position {
  uint64_t segment;
  uint64_t offset;
};

// Gives out the segments in grains that cut big segments and join small ones. Walking on under the lock is cheaper than
// a table of prefix sums, and needs no memory.
class Cursor {
 public:
  Cursor(const ac_segment* segments, uint64_t count) : segments_(segments), count_(count) {}

  bool claim(Position& begin, Position& end) {
    const std::lock_guard lock(guard_);
    begin = next_;
    uint64_t room = grain_bytes;
    const uint64_t last = std::min(count_, next_.segment + grain_segments_max);
    while (next_.segment < last && room > 0) {
      const uint64_t left = segments_[next_.segment].bytes - next_.offset;
      if (left > room) {
        next_.offset += room;
        break;
      }
      room -= left;
      next_ = {next_.segment + 1, 0};
    }
    end = next_;
    return begin.segment != end.segment || begin.offset != end.offset;
  }

 private:
  const ac_segment* segments_;
  uint64_t count_;
  Position next_{0, 0};
  std::mutex guard_;
};

void copy_piece(const ac_segment& segment, uint64_t begin, uint64_t end, const CopyWay& way) {
  char* target = static_cast<char*>(segment.target) + begin;
  const char* source = static_cast<const char*>(segment.source) + begin;
  if (end - begin >= way.bytes_min) {
    way.kernel(target, source, end - begin);
  } else if (end > begin) {
    std::memcpy(target, source, end - begin);
  }
}

void copy_grains(const ac_segment* segments, Cursor& cursor, const CopyWay& way) {
  Position begin, end;
  while (cursor.claim(begin, end)) {
    for (uint64_t index = begin.segment; index < end.segment; ++index) {
      copy_piece(segments[index], index == begin.segment ? begin.offset : 0, segments[index].bytes, way);
    }
    if (end.offset > 0) {
      copy_piece(segments[end.segment], end.segment == begin.segment ? begin.offset : 0, end.offset, way);
    }
  }
  copy_fence();
}

bool is_big(const ac_segment* segments, uint64_t count) {
  uint64_t bytes = 0;
  for (uint64_t index = 0; index < count && bytes < parallel_bytes_min; ++index) bytes += segments[index].bytes;
  return bytes >= parallel_bytes_min;
}

}  // namespace

void copy_portable(char* target, const char* source, size_t bytes) {
  if (bytes > 0) std::memcpy(target, source, bytes);
}

CopyWay copy_way() noexcept {
#if defined(__x86_64__)
  const bool wide = cpu_variant() == CpuVariant::avx512;
  if (cpu_variant() == CpuVariant::portable) return {copy_portable, 0};
  if (cpu_is_intel()) return {wide ? copy_avx512_interleaved : copy_avx2_interleaved, 16 << 10};
  return {wide ? copy_avx512_sequential : copy_avx2_sequential, 512};
#else
  return {copy_portable, 0};
#endif
}

void copy_fence() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

}  // namespace asyncckpt

extern "C" int32_t ac_copy(const ac_segment* segments, uint64_t count, uint32_t threads, ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    require(count == 0 || segments != nullptr, "segments is NULL");
    Cursor cursor(segments, count);
    const CopyWay way = copy_way();
    auto work = [&] { copy_grains(segments, cursor, way); };
    ThreadPool::instance().run(is_big(segments, count) ? threads : 1, work);
  });
}
