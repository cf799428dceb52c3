// Every way of copying rows copies the same bytes, and neither copies nor prints look beside the rows.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "asyncckpt.h"
#include "check.hpp"
#include "digest_kernel.hpp"
#include "row_kernels.hpp"

using namespace asyncckpt;

namespace {

using Rows = std::vector<int64_t>;

// Memory of exactly these bytes, `shift` behind a cache line, so that a sanitizer sees every step beyond its end.
class Exact {
 public:
  Exact(uint64_t bytes, uint64_t shift) : shift_(shift) {
    CHECK(posix_memalign(&room_, 64, shift + bytes) == 0);
    for (uint64_t at = 0; at < bytes; ++at) data()[at] = static_cast<char>(at * 2654435761u >> 11);
  }
  ~Exact() { std::free(room_); }
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;
  char* data() const { return static_cast<char*>(room_) + shift_; }

 private:
  void* room_ = nullptr;
  uint64_t shift_;
};

Rows shuffled(int64_t count, uint64_t seed) {
  Rows rows(static_cast<size_t>(count));
  std::iota(rows.begin(), rows.end(), 0);
  std::shuffle(rows.begin(), rows.end(), std::mt19937_64(seed));
  return rows;
}

std::vector<CopyWay> ways() {
  std::vector<CopyWay> all{{copy_portable, 0}, copy_way()};
#if defined(__x86_64__)
  if (cpu_variant() >= CpuVariant::avx2) all.push_back({copy_avx2_interleaved, 16 << 10});
  if (cpu_variant() >= CpuVariant::avx512) all.push_back({copy_avx512_sequential, 512});
#endif
  return all;
}

}  // namespace

TEST(row_kernels_copy_every_row_and_nothing_beside_it) {
  constexpr int64_t rows_count = 90;
  const Rows sources = shuffled(rows_count, 1), targets = shuffled(rows_count, 2);
  const RowPairs pairs{sources.data(), targets.data(), 80};
  for (const CopyWay& way : ways()) {
    for (const uint64_t bytes : {1, 4, 7, 8, 16, 24, 32, 64, 100, 128, 192, 256, 511, 512, 1000, 1024, 20'000}) {
      for (const uint64_t shift : {0, 4, 60}) {
        const Exact source(rows_count * bytes, 64 - shift), target(rows_count * bytes, shift);
        std::vector<char> expected(target.data(), target.data() + rows_count * bytes);
        for (uint64_t index = 5; index < 75; ++index) {
          std::memcpy(expected.data() + targets[index] * bytes, source.data() + sources[index] * bytes, bytes);
        }
        copy_sparse_rows({source.data(), target.data(), bytes}, pairs, 5, 75, way);
        copy_fence();
        CHECK(std::memcmp(expected.data(), target.data(), expected.size()) == 0);
      }
    }
  }
}

TEST(copy_rows_on_many_threads_copies_all_rows_of_all_columns) {
  constexpr uint64_t rows_count = 70'000;
  const Rows sources = shuffled(rows_count, 3), targets = shuffled(rows_count, 4);
  for (const Rows* from : {&sources, static_cast<const Rows*>(nullptr)}) {
    const Exact ids(rows_count * 8, 0), rows(rows_count * 64, 8);
    const Exact new_ids(rows_count * 8, 0), new_rows(rows_count * 64, 0);
    const ac_row_column columns[] = {{ids.data(), new_ids.data(), 8}, {rows.data(), new_rows.data(), 64}};
    const int64_t* source_rows = from == nullptr ? nullptr : from->data();
    CHECK(ac_copy_rows(columns, 2, source_rows, targets.data(), rows_count, 4, nullptr) == AC_OK);
    for (uint64_t index = 0; index < rows_count; ++index) {
      const uint64_t source = from == nullptr ? index : static_cast<uint64_t>(sources[index]);
      const uint64_t target = static_cast<uint64_t>(targets[index]);
      CHECK(std::memcmp(new_ids.data() + target * 8, ids.data() + source * 8, 8) == 0);
      CHECK(std::memcmp(new_rows.data() + target * 64, rows.data() + source * 64, 64) == 0);
    }
  }
}

TEST(copy_rows_without_row_numbers_copies_rows_in_their_order) {
  const Exact source(5000 * 24, 8), target(5000 * 24, 0);
  std::memset(target.data(), 0, 5000 * 24);
  const ac_row_column column{source.data(), target.data(), 24};
  CHECK(ac_copy_rows(&column, 1, nullptr, nullptr, 5000, 2, nullptr) == AC_OK);
  CHECK(std::memcmp(source.data(), target.data(), 5000 * 24) == 0);
}

TEST(prints_are_the_same_from_every_kernel) {
  for (const uint64_t bytes : {0, 3, 8, 64, 129, 241, 256, 1025}) {
    const Exact rows(33 * bytes, 1);
    std::vector<uint64_t> expected(33);
    digest_portable.chain_rows(rows.data(), bytes, 33, expected.data());
    for (const CpuVariant variant : {CpuVariant::avx2, CpuVariant::avx512}) {
      if (variant > cpu_variant()) continue;
      std::vector<uint64_t> prints(33);
      digest_kernel(variant).chain_rows(rows.data(), bytes, 33, prints.data());
      CHECK(prints == expected);
    }
    std::vector<uint64_t> prints(33, 7);
    const ac_row_column column{rows.data(), nullptr, bytes};
    CHECK(ac_fingerprint(&column, 1, 33, prints.data(), 2, nullptr) == AC_OK);
    CHECK(prints == expected);
  }
}

TEST(broken_contracts_of_rows_are_refused) {
  char source[8] = {}, target[8] = {1};
  const ac_row_column column{source, target, 8}, nowhere{source, nullptr, 8};
  const ac_row_column endless[] = {{source, target, INT64_MAX - 8}, {source, target, 8}};
  const int64_t zero = 0, negative = -1;
  uint64_t print = 0;
  ac_error error;
  CHECK(ac_copy_rows(nullptr, 1, &zero, &zero, 1, 1, &error) == AC_INVALID);
  CHECK(ac_copy_rows(&nowhere, 1, &zero, &zero, 1, 1, &error) == AC_INVALID);
  CHECK(ac_copy_rows(endless, 2, &zero, &zero, 1, 1, &error) == AC_INVALID);
  CHECK(ac_copy_rows(&column, 1, &negative, &zero, 1, 1, &error) == AC_INVALID);
  CHECK(ac_copy_rows(&column, 1, &zero, &negative, 1, 1, &error) == AC_INVALID);
  CHECK(std::strstr(error.message, "negative") != nullptr && target[0] == 1);
  CHECK(ac_fingerprint(nullptr, 1, 1, &print, 1, &error) == AC_INVALID);
  CHECK(ac_fingerprint(&column, 1, 1, nullptr, 1, &error) == AC_INVALID);
}
