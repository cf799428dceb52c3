// ac_copy_rows: gather and scatter rows by index.
//
// 1. The pool's threads claim grains of consecutive indices.
// 2. A grain is split once, for all columns: into dense ranges, whose rows are neighbours both in the source and in the
//    target, and sparse ones between them.
// 3. Column by column, the row kernels copy range after range.
#include <algorithm>
#include <atomic>

#include "asyncckpt.h"
#include "copy_kernel.hpp"
#include "error.hpp"
#include "row_kernels.hpp"
#include "thread_pool.hpp"

namespace asyncckpt {
namespace {

constexpr uint64_t grain_bytes = 1 << 20;
constexpr uint64_t grain_rows_max = 2048;
// Rows are tested for being neighbours in blocks: a branch for every row would be mispredicted where runs are short.
constexpr uint64_t block_rows = 8;
constexpr uint64_t ranges_max = grain_rows_max / block_rows;
// A smaller copy is over before another thread wakes up.
constexpr uint64_t parallel_bytes_min = 1 << 20;
constexpr uint64_t parallel_rows_min = 1 << 14;

struct Range {
  uint64_t begin;
  uint64_t end;
  bool dense;
};

bool are_neighbours(const int64_t* rows, uint64_t count) {
  if (count < block_rows) return false;
  uint64_t difference = 0;
  for (uint64_t index = 0; index < block_rows; ++index) {
    difference |= (static_cast<uint64_t>(rows[index]) - static_cast<uint64_t>(rows[0])) ^ index;
  }
  return difference == 0;
}

bool follows(const int64_t* rows, uint64_t index) { return rows[index] == rows[index - 1] + 1; }

// Returns how many ranges there are, at most ranges_max.
uint64_t split(const RowPairs& pairs, Range* ranges) {
  uint64_t ranges_count = 0;
  for (uint64_t begin = 0; begin < pairs.count; begin += block_rows) {
    const uint64_t count = std::min(block_rows, pairs.count - begin);
    const bool dense = are_neighbours(pairs.sources + begin, count) && are_neighbours(pairs.targets + begin, count);
    Range* last = ranges_count == 0 ? nullptr : &ranges[ranges_count - 1];
    const bool joins = last != nullptr && last->dense == dense &&
                       (!dense || (follows(pairs.sources, begin) && follows(pairs.targets, begin)));
    if (joins) {
      last->end = begin + count;
    } else {
      ranges[ranges_count++] = {begin, begin + count, dense};
    }
  }
  return ranges_count;
}

class RowCopy {
 public:
  // `row_bytes`, of all columns together, is more than 0.
  RowCopy(const ac_row_column* columns, uint64_t columns_count, uint64_t row_bytes, const int64_t* sources,
          const int64_t* targets, uint64_t count)
      : columns_(columns), columns_count_(columns_count), sources_(sources), targets_(targets), count_(count),
        grain_rows_(std::clamp(grain_bytes / row_bytes, block_rows, grain_rows_max)),
        is_big_(count > grain_rows_ && (count >= parallel_rows_min || count >= parallel_bytes_min / row_bytes)) {}

  bool is_big() const { return is_big_; }

  void work() {
    for (uint64_t begin = next_.fetch_add(grain_rows_); begin < count_; begin = next_.fetch_add(grain_rows_)) {
      copy_grain(begin, std::min(grain_rows_, count_ - begin));
    }
    copy_fence();
  }

 private:
  void copy_grain(uint64_t first, uint64_t count) {
    int64_t numbers[grain_rows_max];
    if (sources_ == nullptr || targets_ == nullptr) {
      for (uint64_t index = 0; index < count; ++index) numbers[index] = static_cast<int64_t>(first + index);
    }
    const RowPairs pairs{sources_ == nullptr ? numbers : sources_ + first,
                         targets_ == nullptr ? numbers : targets_ + first, count};
    Range ranges[ranges_max];
    const uint64_t ranges_count = split(pairs, ranges);
    for (uint64_t index = 0; index < columns_count_; ++index) {
      if (columns_[index].row_bytes > 0) copy_column(columns_[index], pairs, ranges, ranges_count);
    }
  }

  void copy_column(const ac_row_column& column, const RowPairs& pairs, const Range* ranges,
                   uint64_t ranges_count) const {
    for (const Range* range = ranges; range < ranges + ranges_count; ++range) {
      (range->dense ? copy_dense_rows : copy_sparse_rows)(column, pairs, range->begin, range->end, way_);
    }
  }

  const ac_row_column* columns_;
  uint64_t columns_count_;
  const int64_t* sources_;
  const int64_t* targets_;
  uint64_t count_;
  uint64_t grain_rows_;
  bool is_big_;
  const CopyWay way_ = copy_way();
  std::atomic<uint64_t> next_{0};
};

// Sums up the bytes of a row over all columns.
uint64_t require_sound(const ac_row_column* columns, uint64_t columns_count, uint64_t count) {
  require(columns_count == 0 || columns != nullptr, "columns is NULL");
  uint64_t row_bytes = 0;
  for (uint64_t index = 0; index < columns_count; ++index) {
    const ac_row_column& column = columns[index];
    const bool empty = count == 0 || column.row_bytes == 0;
    require(empty || (column.source != nullptr && column.target != nullptr), "a column has no source or no target");
    require(column.row_bytes < INT64_MAX - row_bytes, "a row is too long");
    row_bytes += column.row_bytes;
  }
  return row_bytes;
}

void require_rows(const int64_t* rows, uint64_t count) {
  int64_t signs = 0;
  for (uint64_t index = 0; rows != nullptr && index < count; ++index) signs |= rows[index];
  require(signs >= 0, "a row to copy is negative");
}

}  // namespace
}  // namespace asyncckpt

extern "C" int32_t ac_copy_rows(const ac_row_column* columns, uint64_t columns_count, const int64_t* source_rows,
                                const int64_t* target_rows, uint64_t count, uint32_t threads, ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    const uint64_t row_bytes = require_sound(columns, columns_count, count);
    require_rows(source_rows, count);
    require_rows(target_rows, count);
    if (row_bytes == 0) return;
    RowCopy copy(columns, columns_count, row_bytes, source_rows, target_rows, count);
    auto work = [&] { copy.work(); };
    ThreadPool::instance().run(copy.is_big() ? threads : 1, work);
  });
}
