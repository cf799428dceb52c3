#include "row_kernels.hpp"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "prefetch.hpp"

namespace asyncckpt {
namespace {

constexpr uint64_t line_bytes = 64;
// What is fetched ahead of the row that is copied: enough misses at once, and no more than the first-level cache holds.
constexpr uint64_t ahead_bytes = 4096;
constexpr uint64_t ahead_rows_min = 4;
constexpr uint64_t ahead_rows_max = 64;
// The processor fetches the rest of a longer row by itself.
constexpr uint64_t fetched_bytes_max = 1024;
// The kernels are made for long pieces.
constexpr uint64_t kernel_bytes_min = 512;

// How one row is copied. `streams`: the target is not read on the way, so it is not fetched either.

template <uint64_t fixed_bytes>
struct FixedRow {
  static constexpr bool streams = false;
  static constexpr uint64_t bytes = fixed_bytes;
  void operator()(char* target, const char* source) const { std::memcpy(target, source, fixed_bytes); }
};

// A call of memcpy costs little beside a cache miss, also for short rows.
struct AnyRow {
  static constexpr bool streams = false;
  uint64_t bytes;
  void operator()(char* target, const char* source) const { std::memcpy(target, source, bytes); }
};

struct KernelRow {
  static constexpr bool streams = true;
  uint64_t bytes;
  CopyKernel kernel;
  void operator()(char* target, const char* source) const { kernel(target, source, bytes); }
};

#if defined(__SSE2__)
// Whole lines; 0 stands for any number of them. The caller fences.
template <uint64_t fixed_bytes>
struct StreamedRow {
  static constexpr bool streams = true;
  uint64_t bytes;

  void operator()(char* target, const char* source) const {
    const uint64_t end = fixed_bytes == 0 ? bytes : fixed_bytes;
    for (uint64_t at = 0; at < end; at += line_bytes) {
      __m128i parts[4];
      for (int part = 0; part < 4; ++part) {
        parts[part] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at) + part);
      }
      auto* line = reinterpret_cast<__m128i*>(target + at);
      for (int part = 0; part < 4; ++part) _mm_stream_si128(line + part, parts[part]);
    }
  }
};
#endif

const char* source_row(const ac_row_column& column, int64_t row, uint64_t bytes) {
  return static_cast<const char*>(column.source) + static_cast<uint64_t>(row) * bytes;
}

char* target_row(const ac_row_column& column, int64_t row, uint64_t bytes) {
  return static_cast<char*>(column.target) + static_cast<uint64_t>(row) * bytes;
}

template <class Row>
void copy_each(const ac_row_column& column, const RowPairs& pairs, uint64_t begin, uint64_t end, const Row& row) {
  const uint64_t ahead = std::clamp(ahead_bytes / row.bytes, ahead_rows_min, ahead_rows_max);
  const uint64_t fetched_bytes = std::min<uint64_t>(row.bytes, fetched_bytes_max);
  // Such rows reach over one line more than they fill.
  const bool uneven = line_bytes % row.bytes != 0 && row.bytes % line_bytes != 0;
  for (uint64_t index = begin; index < end; ++index) {
    const uint64_t next = std::min(index + ahead, pairs.count - 1);
    const char* next_source = source_row(column, pairs.sources[next], row.bytes);
    char* next_target = target_row(column, pairs.targets[next], row.bytes);
    for (uint64_t at = 0; at < fetched_bytes; at += line_bytes) {
      prefetch_to_read(next_source + at);
      if constexpr (!Row::streams) prefetch_to_write(next_target + at);
    }
    if (uneven) {
      prefetch_to_read(next_source + fetched_bytes - 1);
      if constexpr (!Row::streams) prefetch_to_write(next_target + fetched_bytes - 1);
    }
    row(target_row(column, pairs.targets[index], row.bytes), source_row(column, pairs.sources[index], row.bytes));
  }
}

}  // namespace

void copy_sparse_rows(const ac_row_column& column, const RowPairs& pairs, uint64_t begin, uint64_t end,
                      const CopyWay& way) {
  const uint64_t bytes = column.row_bytes;
  const auto each = [&](const auto& row) { copy_each(column, pairs, begin, end, row); };
  if (bytes >= std::max<uint64_t>(way.bytes_min, kernel_bytes_min)) return each(KernelRow{bytes, way.kernel});
#if defined(__SSE2__)
  if (bytes % line_bytes == 0 && reinterpret_cast<uintptr_t>(column.target) % line_bytes == 0) {
    if (bytes == 64) return each(StreamedRow<64>{bytes});
    if (bytes == 128) return each(StreamedRow<128>{bytes});
    if (bytes == 256) return each(StreamedRow<256>{bytes});
    return each(StreamedRow<0>{bytes});
  }
#endif
  if (bytes == 4) return each(FixedRow<4>{});
  if (bytes == 8) return each(FixedRow<8>{});
  if (bytes == 16) return each(FixedRow<16>{});
  if (bytes == 32) return each(FixedRow<32>{});
  if (bytes == 64) return each(FixedRow<64>{});
  if (bytes == 128) return each(FixedRow<128>{});
  each(AnyRow{bytes});
}

void copy_dense_rows(const ac_row_column& column, const RowPairs& pairs, uint64_t begin, uint64_t end,
                     const CopyWay& way) {
  char* target = target_row(column, pairs.targets[begin], column.row_bytes);
  const char* source = source_row(column, pairs.sources[begin], column.row_bytes);
  const uint64_t bytes = (end - begin) * column.row_bytes;
  if (bytes >= way.bytes_min) {
    way.kernel(target, source, bytes);
  } else {
    std::memcpy(target, source, bytes);
  }
}

}  // namespace asyncckpt
