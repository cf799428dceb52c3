// Marks are set and found in exactly their memory, on any number of threads.
#include <random>
#include <vector>

#include "asyncckpt.h"
#include "check.hpp"

namespace {

using Rows = std::vector<int64_t>;

Rows marked_plainly(const std::vector<uint8_t>& marks, uint8_t above) {
  Rows rows;
  for (size_t row = 0; row < marks.size(); ++row) {
    if (marks[row] > above) rows.push_back(static_cast<int64_t>(row));
  }
  return rows;
}

}  // namespace

TEST(mark_sets_all_or_nothing) {
  std::vector<uint8_t> marks(1000);
  Rows rows{-1, 999, 0, -1, 500};
  CHECK(ac_mark(marks.data(), marks.size(), rows.data(), rows.size(), 3, nullptr) == AC_OK);
  CHECK(marked_plainly(marks, 2) == Rows({0, 500, 999}));
  for (const int64_t bad : {int64_t{-2}, int64_t{1000}, INT64_MIN, INT64_MAX}) {
    rows.back() = bad;
    CHECK(ac_mark(marks.data(), marks.size(), rows.data(), rows.size(), 9, nullptr) == AC_INVALID);
    CHECK(marked_plainly(marks, 3).empty());
  }
}

TEST(marked_rows_are_found_on_many_threads) {
  std::mt19937_64 random(5);
  for (const size_t count : {0, 1, 63, 64, 65, 4097, 3'000'017}) {
    std::vector<uint8_t> marks(count);
    for (uint8_t& mark : marks) mark = static_cast<uint8_t>(random() % 200);
    const Rows expected = marked_plainly(marks, 190);
    for (const uint32_t threads : {1, 4}) {
      Rows rows(expected.size());
      uint64_t found = 77;
      CHECK(ac_marked(marks.data(), count, 190, rows.data(), rows.size(), &found, threads, nullptr) == AC_OK);
      CHECK(found == expected.size() && rows == expected);
    }
  }
}

TEST(marked_rows_without_room_are_only_counted) {
  const std::vector<uint8_t> marks(300, 2);
  Rows rows(299, -5);
  uint64_t found = 0;
  CHECK(ac_marked(marks.data(), marks.size(), 1, rows.data(), rows.size(), &found, 1, nullptr) == AC_OK);
  CHECK(found == 300 && rows == Rows(299, -5));
  CHECK(ac_marked(marks.data(), marks.size(), 1, nullptr, 0, &found, 1, nullptr) == AC_OK && found == 300);
}

TEST(broken_contracts_of_marks_are_refused) {
  uint8_t mark = 0;
  int64_t row = 0;
  uint64_t count = 0;
  CHECK(ac_mark(nullptr, 1, &row, 1, 1, nullptr) == AC_INVALID);
  CHECK(ac_mark(&mark, 1, nullptr, 1, 1, nullptr) == AC_INVALID);
  CHECK(ac_marked(nullptr, 1, 0, &row, 1, &count, 1, nullptr) == AC_INVALID);
  CHECK(ac_marked(&mark, 1, 0, nullptr, 1, &count, 1, nullptr) == AC_INVALID);
  CHECK(ac_marked(&mark, 1, 0, &row, 1, nullptr, 1, nullptr) == AC_INVALID);
}
