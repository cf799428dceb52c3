// The device's prints are those of XXH3, for every length, alignment and seed.
#define XXH_INLINE_ALL
#include "../../third_party/xxhash.h"

#include "asyncckpt_cuda.h"
#include "check.hpp"
#include "cuda_on_cpu.h"
#include "guarded.hpp"

namespace {

void expect_prints(Guarded& prints, const std::vector<ac_row_column>& columns, uint64_t rows_count) {
  for (uint64_t row = 0; row < rows_count; ++row) {
    uint64_t print = 0;
    for (const ac_row_column& column : columns) {
      const char* source = static_cast<const char*>(column.source) + row * column.row_bytes;
      print = XXH3_64bits_withSeed(source, column.row_bytes, print);
    }
    prints.expect(row * 8, &print, 8);
  }
}

bool prints_are_right(const std::vector<ac_row_column>& columns, uint64_t rows_count) {
  Guarded prints(rows_count * 8, 8, 1);
  expect_prints(prints, columns, rows_count);
  CHECK(ac_cuda_fingerprint(0, columns.data(), columns.size(), rows_count, reinterpret_cast<uint64_t*>(prints.data()),
                            nullptr, nullptr) == AC_OK);
  return prints.is_as_expected();
}

}  // namespace

TEST(prints_of_every_length_and_alignment) {
  constexpr uint64_t rows_count = 3;
  std::vector<uint64_t> lengths = {512, 1000, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049, 4095, 4096, 4097, 20'000};
  for (uint64_t bytes = 0; bytes < 400; ++bytes) lengths.push_back(bytes);
  for (const uint64_t bytes : lengths) {
    for (const uint64_t shift : {0, 4, 8, 1, 16}) {
      const Guarded source(rows_count * bytes, shift, bytes);
      // The first column gives the second one seeds.
      const ac_row_column column{source.data(), nullptr, bytes};
      CHECK(prints_are_right({column, column}, rows_count));
    }
  }
}

TEST(prints_of_more_columns_and_rows_than_one_launch_takes) {
  constexpr uint64_t rows_count = 300;
  const Guarded source(rows_count * 200 + 64, 0, 1);
  std::vector<ac_row_column> columns;
  for (uint64_t index = 0; index < 200; ++index) columns.push_back({source.data() + index % 9, nullptr, index});
  const uint64_t launches = cuda_on_cpu_launches();
  CHECK(prints_are_right(columns, rows_count));
  CHECK(cuda_on_cpu_launches() == launches + 3);
  CHECK(prints_are_right({{source.data(), nullptr, 2}}, 20'000));
}

TEST(prints_of_nothing) {
  CHECK(prints_are_right({}, 5));
  CHECK(prints_are_right({{nullptr, nullptr, 0}}, 5));
  const uint64_t launches = cuda_on_cpu_launches();
  CHECK(prints_are_right({{nullptr, nullptr, 8}}, 0));
  CHECK(ac_cuda_fingerprint(0, nullptr, 0, 0, nullptr, nullptr, nullptr) == AC_OK);
  CHECK(cuda_on_cpu_launches() == launches);
}

TEST(broken_contracts_of_prints_are_refused) {
  alignas(8) char source[16] = {}, prints[16] = {};
  auto* place = reinterpret_cast<uint64_t*>(prints);
  const ac_row_column column{source, nullptr, 8}, nowhere{nullptr, nullptr, 8};
  ac_error error;
  CHECK(ac_cuda_fingerprint(0, nullptr, 1, 1, place, nullptr, &error) == AC_INVALID);
  CHECK(ac_cuda_fingerprint(0, &column, 1, 1, nullptr, nullptr, &error) == AC_INVALID);
  CHECK(ac_cuda_fingerprint(0, &column, 1, 1, reinterpret_cast<uint64_t*>(prints + 4), nullptr, &error) == AC_INVALID);
  CHECK(ac_cuda_fingerprint(0, &nowhere, 1, 1, place, nullptr, &error) == AC_INVALID);
}
