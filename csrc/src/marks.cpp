// ac_mark and ac_marked: one byte per row that says in which epoch it was last written.
#include <algorithm>
#include <atomic>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "asyncckpt.h"
#include "error.hpp"
#include "marks.hpp"
#include "prefetch.hpp"
#include "thread_pool.hpp"

namespace asyncckpt {
namespace {

constexpr uint64_t rows_ahead = 32;
constexpr uint64_t block_rows = 64;
constexpr uint64_t slice_rows = 256 << 10;
// A smaller scan is over before another thread wakes up.
constexpr uint64_t parallel_rows_min = 2 << 20;

bool all_inside(const int64_t* rows, uint64_t count, uint64_t marks_count) {
  bool outside = false;
  // -1 becomes 0, and every other negative row a number greater than any count.
  for (uint64_t index = 0; index < count; ++index) outside |= static_cast<uint64_t>(rows[index]) + 1 > marks_count;
  return !outside;
}

void mark(uint8_t* marks, const int64_t* rows, uint64_t count, uint8_t value) {
  // What is passed over is stored here: where some rows are -1 and some are not, a branch would be mispredicted.
  uint8_t nowhere;
  const auto place = [&](int64_t row) { return row < 0 ? &nowhere : marks + row; };
  const uint64_t fetched = count > rows_ahead ? count - rows_ahead : 0;
  for (uint64_t index = 0; index < fetched; ++index) {
    prefetch_to_write(place(rows[index + rows_ahead]));
    *place(rows[index]) = value;
  }
  for (uint64_t index = fetched; index < count; ++index) *place(rows[index]) = value;
}

}  // namespace

void mark_used(uint8_t* marks, uint64_t marks_count, const int64_t* rows, uint64_t count, uint8_t value) {
  uint8_t nowhere = 0;
  // -1 is a number greater than any count.
  const auto place = [&](int64_t row) { return static_cast<uint64_t>(row) < marks_count ? marks + row : &nowhere; };
  for (uint64_t index = 0; index < count; ++index) {
    if (index + rows_ahead < count) prefetch_to_write(place(rows[index + rows_ahead]));
    uint8_t& mark = *place(rows[index]);
    mark = mark == 0 ? 0 : value;
  }
}

namespace {

// A block of marks compared with a limit: which are greater, as one bit per row and as a number.
#if defined(__SSE2__)
class Block {
 public:
  Block(const uint8_t* marks, uint8_t above) {
    const __m128i limit = _mm_set1_epi8(static_cast<char>(above));
    for (int part = 0; part < 4; ++part) {
      const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(marks) + part);
      others_[part] = _mm_cmpeq_epi8(_mm_max_epu8(values, limit), limit);
    }
  }

  uint64_t bits() const {
    uint64_t others = 0;
    for (int part = 0; part < 4; ++part) {
      others |= static_cast<uint64_t>(static_cast<uint32_t>(_mm_movemask_epi8(others_[part]))) << (16 * part);
    }
    return ~others;
  }

  uint64_t count() const {
    // A byte of them is -1 where its mark is not above, so four of them and 4 count those that are.
    const __m128i sums = _mm_add_epi8(_mm_add_epi8(others_[0], others_[1]), _mm_add_epi8(others_[2], others_[3]));
    const __m128i halves = _mm_sad_epu8(_mm_add_epi8(sums, _mm_set1_epi8(4)), _mm_setzero_si128());
    return static_cast<uint64_t>(_mm_cvtsi128_si32(halves)) +
           static_cast<uint64_t>(_mm_cvtsi128_si32(_mm_srli_si128(halves, 8)));
  }

 private:
  __m128i others_[4];
};
#else
class Block {
 public:
  Block(const uint8_t* marks, uint8_t above) : marks_(marks), above_(above) {}

  uint64_t bits() const {
    if (*std::max_element(marks_, marks_ + block_rows) <= above_) return 0;
    uint64_t bits = 0;
    for (uint64_t row = 0; row < block_rows; ++row) bits |= static_cast<uint64_t>(marks_[row] > above_) << row;
    return bits;
  }

  uint64_t count() const {
    uint64_t count = 0;
    for (uint64_t row = 0; row < block_rows; ++row) count += marks_[row] > above_;
    return count;
  }

 private:
  const uint8_t* marks_;
  uint8_t above_;
};
#endif

uint64_t count_rows(const uint8_t* marks, uint64_t begin, uint64_t end, uint8_t above) {
  uint64_t count = 0;
  for (; begin + block_rows <= end; begin += block_rows) count += Block(marks + begin, above).count();
  for (; begin < end; ++begin) count += marks[begin] > above;
  return count;
}

void list_rows(const uint8_t* marks, uint64_t begin, uint64_t end, uint8_t above, int64_t* rows) {
  for (; begin + block_rows <= end; begin += block_rows) {
    for (uint64_t bits = Block(marks + begin, above).bits(); bits != 0; bits &= bits - 1) {
      *rows++ = static_cast<int64_t>(begin) + __builtin_ctzll(bits);
    }
  }
  for (; begin < end; ++begin) {
    if (marks[begin] > above) *rows++ = static_cast<int64_t>(begin);
  }
}

template <class Body>
void for_each_slice(uint64_t rows_count, uint32_t threads, Body&& body) {
  std::atomic<uint64_t> next{0};
  auto work = [&] {
    for (uint64_t begin = next.fetch_add(slice_rows); begin < rows_count; begin = next.fetch_add(slice_rows)) {
      body(begin / slice_rows, begin, std::min(begin + slice_rows, rows_count));
    }
  };
  ThreadPool::instance().run(rows_count < parallel_rows_min ? 1 : threads, work);
}

// Slices are counted first: then it is known where the rows of each begin, and whether there is room at all.
uint64_t marked(const uint8_t* marks, uint64_t count, uint8_t above, int64_t* rows, uint64_t room, uint32_t threads) {
  std::vector<uint64_t> places((count + slice_rows - 1) / slice_rows + 1);
  for_each_slice(count, threads, [&](uint64_t slice, uint64_t begin, uint64_t end) {
    places[slice + 1] = count_rows(marks, begin, end, above);
  });
  for (uint64_t slice = 1; slice < places.size(); ++slice) places[slice] += places[slice - 1];
  if (places.back() > room) return places.back();
  for_each_slice(count, threads, [&](uint64_t slice, uint64_t begin, uint64_t end) {
    if (places[slice] < places[slice + 1]) list_rows(marks, begin, end, above, rows + places[slice]);
  });
  return places.back();
}

}  // namespace
}  // namespace asyncckpt

extern "C" {

int32_t ac_mark(uint8_t* marks, uint64_t marks_count, const int64_t* rows, uint64_t count, uint8_t value,
                ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    require(marks_count == 0 || marks != nullptr, "marks is NULL");
    require(count == 0 || rows != nullptr, "rows is NULL");
    require(all_inside(rows, count, marks_count), "a row to mark is neither -1 nor one of the rows");
    mark(marks, rows, count, value);
  });
}

int32_t ac_marked(const uint8_t* marks, uint64_t marks_count, uint8_t above, int64_t* rows, uint64_t room,
                  uint64_t* count, uint32_t threads, ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    require(marks_count == 0 || marks != nullptr, "marks is NULL");
    require(count != nullptr && (room == 0 || rows != nullptr), "rows or count is NULL");
    *count = marked(marks, marks_count, above, rows, room, threads);
  });
}

}  // extern "C"
