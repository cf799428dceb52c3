// Rows of every width, alignment and order arrive, cast or not, and nothing beside them changes.
#include <algorithm>
#include <memory>
#include <numeric>

#include "asyncckpt_cuda.h"
#include "check.hpp"
#include "cuda_on_cpu.h"
#include "guarded.hpp"

namespace {

using Rows = std::vector<int64_t>;

Rows shuffled(uint64_t count, uint64_t seed) {
  Rows rows(count);
  std::iota(rows.begin(), rows.end(), 0);
  std::shuffle(rows.begin(), rows.end(), std::mt19937_64(seed_of_tests + seed));
  return rows;
}

// Rounds by comparing with both neighbours, not by bits.
uint16_t nearest_bfloat16(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  if (value != value) return 0x7FFF;
  const uint16_t below = static_cast<uint16_t>(bits >> 16);
  if ((bits & 0xFFFF) == 0) return below;
  const uint16_t above = static_cast<uint16_t>(below + 1);
  // The step from one to the other, also where `above` is infinity.
  const uint32_t low = uint32_t{below} << 16, half = low + 0x8000;
  if (bits == half) return below % 2 == 0 ? below : above;
  return bits < half ? below : above;
}

// Columns of a table and of another one that is to become alike.
struct Table {
  uint64_t rows_count;
  std::vector<std::unique_ptr<Guarded>> sources, targets;
  std::vector<ac_row_column> columns;
  std::vector<uint8_t> casts;

  explicit Table(uint64_t rows) : rows_count(rows) {}

  void add(uint64_t row_bytes, uint64_t source_shift, uint64_t target_shift, bool cast = false) {
    const uint64_t seed = 2 * columns.size();
    sources.push_back(std::make_unique<Guarded>(rows_count * row_bytes, source_shift, seed));
    targets.push_back(std::make_unique<Guarded>(rows_count * row_bytes / (cast ? 2 : 1), target_shift, seed + 1));
    columns.push_back({sources.back()->data(), targets.back()->data(), row_bytes});
    casts.push_back(cast ? AC_CUDA_TO_BFLOAT16 : AC_CUDA_AS_IS);
  }

  void expect(uint64_t source_row, uint64_t target_row) {
    for (uint64_t index = 0; index < columns.size(); ++index) {
      const uint64_t bytes = columns[index].row_bytes;
      const char* source = sources[index]->data() + source_row * bytes;
      if (casts[index] == AC_CUDA_AS_IS) {
        targets[index]->expect(target_row * bytes, source, bytes);
        continue;
      }
      for (uint64_t at = 0; at < bytes; at += 4) {
        uint32_t value;
        std::memcpy(&value, source + at, 4);
        const uint16_t rounded = nearest_bfloat16(value);
        targets[index]->expect((target_row * bytes + at) / 2, &rounded, 2);
      }
    }
  }

  void expect(const int64_t* source_rows, const int64_t* target_rows, uint64_t count) {
    for (uint64_t index = 0; index < count; ++index) {
      const int64_t row = static_cast<int64_t>(index);
      const int64_t source = source_rows == nullptr ? row : source_rows[index];
      const int64_t target = target_rows == nullptr ? row : target_rows[index];
      if (source >= 0 && target >= 0) expect(static_cast<uint64_t>(source), static_cast<uint64_t>(target));
    }
  }

  bool arrived() const {
    return std::all_of(targets.begin(), targets.end(), [](const auto& target) { return target->is_as_expected(); });
  }
};

int32_t copy_rows(const Table& table, const int64_t* sources, const int64_t* targets, uint64_t count) {
  return ac_cuda_copy_rows(0, table.columns.data(), table.casts.data(), table.columns.size(), sources, targets, count,
                           nullptr, nullptr);
}

void add_columns_of_every_kind(Table& table) {
  for (const uint64_t row_bytes :
       {0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 48, 64, 100, 128, 256, 511, 512, 513, 528, 1024}) {
    table.add(row_bytes, 0, 0);
    table.add(row_bytes, 4, 0);
    table.add(row_bytes, 16, 1);
  }
  for (const uint64_t row_bytes : {0, 4, 12, 16, 64, 512, 1028}) {
    table.add(row_bytes, 0, 0, true);
    table.add(row_bytes, 16, 8, true);
    table.add(row_bytes, 4, 2, true);
    table.add(row_bytes, 16, 4, true);
  }
}

}  // namespace

TEST(rows_of_every_width_in_any_order) {
  constexpr uint64_t rows_count = 150, count = 130;
  const Rows sources = shuffled(rows_count, 1), targets = shuffled(rows_count, 2);
  const int64_t* none = nullptr;
  for (const int64_t* from : {sources.data(), none}) {
    for (const int64_t* to : {targets.data(), none}) {
      Table table(rows_count);
      add_columns_of_every_kind(table);
      const uint64_t launches = cuda_on_cpu_launches();
      table.expect(from, to, count);
      CHECK(copy_rows(table, from, to, count) == AC_OK);
      CHECK(table.arrived());
      CHECK(cuda_on_cpu_launches() == launches + 2);
    }
  }
}

TEST(many_rows_and_long_rows) {
  Table narrow(40'000), wide(5);
  narrow.add(8, 0, 0);
  narrow.add(1, 0, 3);
  wide.add(100'000, 0, 0);
  wide.add(16'384, 16, 0);
  wide.add(16'385, 0, 0);
  wide.add(100'000, 0, 0, true);
  for (Table* table : {&narrow, &wide}) {
    const Rows sources = shuffled(table->rows_count, 3), targets = shuffled(table->rows_count, 4);
    table->expect(sources.data(), targets.data(), sources.size());
    CHECK(copy_rows(*table, sources.data(), targets.data(), sources.size()) == AC_OK);
    CHECK(table->arrived());
  }
}

TEST(negative_rows_are_passed_over) {
  Table table(40);
  table.add(8, 0, 0);
  table.add(33, 0, 0);
  Rows sources = shuffled(40, 5), targets = shuffled(40, 6);
  sources[3] = targets[7] = -1;
  sources[9] = INT64_MIN;
  targets[11] = INT64_MIN;
  table.expect(sources.data(), targets.data(), 40);
  CHECK(copy_rows(table, sources.data(), targets.data(), 40) == AC_OK);
  CHECK(table.arrived());
}

// Rows far beyond 4 GiB: the columns begin so far before their memory that only these rows lie in it.
TEST(row_numbers_beyond_32_bits) {
  constexpr int64_t far = (int64_t{1} << 33) + 5;
  constexpr uint64_t row_bytes = 512;
  Guarded source(row_bytes * 4, 0, 1), target(row_bytes * 4, 0, 2);
  const auto before = [](char* data) {
    return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(data) - static_cast<uint64_t>(far) * row_bytes);
  };
  const ac_row_column column{before(source.data()), before(target.data()), row_bytes};
  const Rows sources = {far + 3, far, far + 1}, targets = {far, far + 2, far + 3};
  for (int index = 0; index < 3; ++index) {
    target.expect((targets[index] - far) * row_bytes, source.data() + (sources[index] - far) * row_bytes, row_bytes);
  }
  CHECK(ac_cuda_copy_rows(0, &column, nullptr, 1, sources.data(), targets.data(), 3, nullptr, nullptr) == AC_OK);
  CHECK(target.is_as_expected());
}

TEST(bfloat16_of_every_kind_of_number) {
  std::vector<uint32_t> values;
  // Upper halves of all kinds, with lower halves around the tie and at the ends.
  std::vector<uint32_t> uppers = {0x7F7F, 0x7F80, 0x7FC0, 0xFF7F, 0xFF80, 0xFFFF, 0x0000, 0x8000};
  for (uint32_t upper = 0; upper < 0x10000; upper += 7) uppers.push_back(upper);
  for (const uint32_t upper : uppers) {
    for (const uint32_t lower : {0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF}) values.push_back(upper << 16 | lower);
  }
  std::vector<uint16_t> rounded(values.size());
  const ac_row_column column{values.data(), rounded.data(), values.size() * 4};
  const uint8_t cast = AC_CUDA_TO_BFLOAT16;
  CHECK(ac_cuda_copy_rows(0, &column, &cast, 1, nullptr, nullptr, 1, nullptr, nullptr) == AC_OK);
  for (uint64_t index = 0; index < values.size(); ++index) CHECK(rounded[index] == nearest_bfloat16(values[index]));
}

TEST(marked_rows_alone_are_copied) {
  constexpr uint64_t rows_count = 333;
  for (const uint8_t above : {0, 1, 100, 254, 255}) {
    Table table(rows_count);
    add_columns_of_every_kind(table);
    std::mt19937_64 random(seed_of_tests + above);
    std::vector<uint8_t> marks(rows_count);
    for (uint8_t& mark : marks) mark = random() % 3 == 0 ? above : static_cast<uint8_t>(random());
    for (uint64_t row = 0; row < rows_count; ++row) {
      if (marks[row] > above) table.expect(row, row);
    }
    CHECK(ac_cuda_copy_marked_rows(1, table.columns.data(), table.casts.data(), table.columns.size(), marks.data(),
                                   above, rows_count, nullptr, nullptr) == AC_OK);
    CHECK(table.arrived());
  }
}

TEST(rows_of_nothing_launch_nothing) {
  const uint64_t launches = cuda_on_cpu_launches();
  const ac_row_column nothing{nullptr, nullptr, 0}, column{nullptr, nullptr, 8};
  const uint8_t mark = 1;
  CHECK(ac_cuda_copy_rows(0, nullptr, nullptr, 0, nullptr, nullptr, 5, nullptr, nullptr) == AC_OK);
  CHECK(ac_cuda_copy_rows(0, &nothing, nullptr, 1, nullptr, nullptr, INT64_MAX, nullptr, nullptr) == AC_OK);
  CHECK(ac_cuda_copy_rows(0, &column, nullptr, 1, nullptr, nullptr, 0, nullptr, nullptr) == AC_OK);
  CHECK(ac_cuda_copy_marked_rows(0, &column, nullptr, 1, nullptr, 0, 0, nullptr, nullptr) == AC_OK);
  CHECK(ac_cuda_copy_marked_rows(0, &nothing, nullptr, 1, &mark, 0, 1, nullptr, nullptr) == AC_OK);
  CHECK(cuda_on_cpu_launches() == launches);
}

TEST(rows_to_the_host_take_few_blocks) {
  void* page = nullptr;
  constexpr uint64_t bytes = 64 * AC_PAGE_BYTES;
  CHECK(posix_memalign(&page, AC_PAGE_BYTES, bytes) == 0);
  const Guarded source(bytes, 0, 1);
  const ac_row_column columns[] = {{source.data(), page, 1}, {source.data(), page, 1}};
  CHECK(ac_cuda_copy_rows(0, columns, nullptr, 2, nullptr, nullptr, bytes, nullptr, nullptr) == AC_OK);
  CHECK(cuda_on_cpu_last_blocks() == 16);
  CHECK(ac_cuda_host_register(0, page, bytes, nullptr) == AC_OK);
  CHECK(ac_cuda_copy_rows(0, columns, nullptr, 2, nullptr, nullptr, bytes, nullptr, nullptr) == AC_OK);
  CHECK(cuda_on_cpu_last_blocks() == AC_CUDA_HOST_BLOCKS);
  CHECK(std::memcmp(page, source.data(), bytes) == 0);
  CHECK(ac_cuda_host_unregister(0, page, nullptr) == AC_OK);
  std::free(page);
}

TEST(broken_contracts_of_rows_on_the_device_are_refused) {
  alignas(16) char source[16] = {}, target[16] = {1};
  const ac_row_column column{source, target, 8}, nowhere{source, nullptr, 8}, endless{source, target, UINT64_MAX};
  const ac_row_column odd{source, target, 6}, shifted{source + 2, target, 8}, to_odd{source, target + 1, 8};
  const uint8_t cast = AC_CUDA_TO_BFLOAT16, unknown = 2, mark = 1;
  alignas(8) const char rows[16] = {};
  const auto* crooked = reinterpret_cast<const int64_t*>(rows + 4);
  const uint64_t launches = cuda_on_cpu_launches();
  const auto refused = [](const ac_row_column* columns, const uint8_t* casts, const int64_t* numbers, uint64_t count) {
    return ac_cuda_copy_rows(0, columns, casts, 1, numbers, nullptr, count, nullptr, nullptr) == AC_INVALID;
  };
  CHECK(refused(nullptr, nullptr, nullptr, 1));
  CHECK(refused(&nowhere, nullptr, nullptr, 1));
  CHECK(refused(&endless, nullptr, nullptr, 1));
  CHECK(refused(&column, nullptr, nullptr, uint64_t{1} << 63));
  CHECK(refused(&column, nullptr, crooked, 1));
  CHECK(refused(&column, &unknown, nullptr, 1));
  CHECK(refused(&odd, &cast, nullptr, 1));
  CHECK(refused(&shifted, &cast, nullptr, 1));
  CHECK(refused(&to_odd, &cast, nullptr, 1));
  CHECK(ac_cuda_copy_marked_rows(0, &column, nullptr, 1, nullptr, 0, 1, nullptr, nullptr) == AC_INVALID);
  CHECK(ac_cuda_copy_marked_rows(0, &nowhere, nullptr, 1, &mark, 0, 1, nullptr, nullptr) == AC_INVALID);
  CHECK(cuda_on_cpu_launches() == launches && target[0] == 1);
}
