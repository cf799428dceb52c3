// Every variant of the update gives the same bits, on any number of threads, in exactly its memory.
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "asyncckpt.h"
#include "check.hpp"
#include "update_kernel.hpp"

namespace {

using asyncckpt::CpuVariant;

constexpr uint64_t rows_count = 700;

// Columns of one table, as bytes of random numbers of all sizes, and an update of some of its rows.
struct Table {
  std::vector<uint8_t> gradient, weight, first, second, marks;
  std::vector<int64_t> rows;
  std::vector<float> numbers;
  ac_row_update update{};

  Table(uint32_t rule, uint64_t dim, uint32_t kind, bool rowwise, uint64_t seed) : marks(rows_count) {
    std::mt19937_64 random(seed);
    for (uint64_t row = 0; row < rows_count; ++row) {
      if (random() % 3 == 0) rows.push_back(random() % 9 == 0 ? -1 : static_cast<int64_t>(row));
    }
    const bool last_is_second = rule == AC_RULE_ADAM || rule == AC_RULE_FTRL;
    const uint64_t narrow = rowwise ? 1 : dim;
    gradient = column(random, rows.size() * dim, kind, false);
    weight = column(random, rows_count * dim, kind, false);
    first = column(random, rows_count * (last_is_second ? dim : narrow), AC_FLOAT32, rule != AC_RULE_ADAM);
    second = column(random, rows_count * narrow, AC_FLOAT32, rule == AC_RULE_ADAM);
    numbers = {0.1f, seed % 2 ? 0.01f : 0.0f, 0.9f, 0.1f, 0.99f, 0.01f, 1.5f, 1e-8f};
    if (rule == AC_RULE_FTRL) numbers[0] = 10.0f;
    update.gradient = gradient.data(), update.weight = weight.data(), update.first = first.data();
    update.second = last_is_second ? second.data() : nullptr;
    update.marks = marks.data(), update.mark = 7;
    update.numbers = numbers.data(), update.rows_count = rows_count, update.dim = dim, update.rule = rule;
    update.gradient_float = update.weight_float = kind;
    update.rowwise = rowwise;
  }

  static std::vector<uint8_t> column(std::mt19937_64& random, uint64_t count, uint32_t kind, bool positive) {
    std::vector<uint8_t> bytes(count * (kind == AC_FLOAT32 ? 4 : 2));
    for (uint64_t at = 0; at < count; ++at) {
      const float value = std::ldexp(static_cast<float>(random() % 2001) - (positive ? 0.0f : 1000.0f), -9);
      const uint32_t bits = std::bit_cast<uint32_t>(value);
      // Any bits of float16 but those of NaN and infinity will do.
      const uint16_t half = static_cast<uint16_t>(kind == AC_BFLOAT16 ? bits >> 16 : random() & 0xBBFFu);
      if (kind == AC_FLOAT32) std::memcpy(&bytes[at * 4], &bits, 4);
      if (kind != AC_FLOAT32) std::memcpy(&bytes[at * 2], &half, 2);
    }
    return bytes;
  }

  bool operator==(const Table& other) const {
    return weight == other.weight && first == other.first && second == other.second && marks == other.marks;
  }
};

std::vector<CpuVariant> variants_here() {
  std::vector<CpuVariant> variants{CpuVariant::portable};
  if (asyncckpt::cpu_variant() != CpuVariant::portable) variants.push_back(CpuVariant::avx2);
  if (asyncckpt::cpu_variant() == CpuVariant::avx512) variants.push_back(CpuVariant::avx512);
  return variants;
}

template <class Body>
void for_each_case(Body&& body) {
  uint64_t seed = 1;
  for (const uint32_t rule : {AC_RULE_SGD, AC_RULE_ADAGRAD, AC_RULE_ADAM, AC_RULE_FTRL}) {
    for (const uint64_t dim : {1, 2, 7, 15, 16, 17, 31, 32, 48, 64, 100, 128, 129}) {
      for (const uint32_t kind : {AC_FLOAT32, AC_FLOAT16, AC_BFLOAT16}) {
        for (const bool rowwise : {false, true}) {
          if (rowwise && rule != AC_RULE_ADAGRAD && rule != AC_RULE_ADAM) continue;
          body(rule, dim, kind, rowwise, ++seed);
        }
      }
    }
  }
}

}  // namespace

TEST(update_variants_give_the_same_bits) {
  for_each_case([](uint32_t rule, uint64_t dim, uint32_t kind, bool rowwise, uint64_t seed) {
    Table plain(rule, dim, kind, rowwise, seed), before(rule, dim, kind, rowwise, seed);
    std::vector<float> scratch(asyncckpt::update_scratch_rows * dim);
    const uint64_t count = plain.rows.size();
    asyncckpt::update_portable(plain.update, plain.rows.data(), 0, count, count, scratch.data());
    CHECK(!(plain == before));
    for (const CpuVariant variant : variants_here()) {
      Table other(rule, dim, kind, rowwise, seed);
      asyncckpt::update_kernel(variant)(other.update, other.rows.data(), 0, count, count, scratch.data());
      CHECK(other == plain);
    }
    for (const uint32_t threads : {1, 4}) {
      Table other(rule, dim, kind, rowwise, seed);
      CHECK(ac_update_rows(&other.update, other.rows.data(), count, threads, nullptr) == AC_OK);
      CHECK(other == plain);
    }
  });
}

TEST(update_on_many_threads_gives_the_same_bits) {
  constexpr uint64_t dim = 1000;
  Table one(AC_RULE_ADAM, dim, AC_BFLOAT16, false, 3), many(AC_RULE_ADAM, dim, AC_BFLOAT16, false, 3);
  CHECK(ac_update_rows(&one.update, one.rows.data(), one.rows.size(), 1, nullptr) == AC_OK);
  CHECK(ac_update_rows(&many.update, many.rows.data(), many.rows.size(), 4, nullptr) == AC_OK);
  CHECK(one == many);
}

TEST(update_refuses_wrong_rows_and_changes_nothing) {
  Table before(AC_RULE_ADAGRAD, 8, AC_FLOAT32, false, 5), table(AC_RULE_ADAGRAD, 8, AC_FLOAT32, false, 5);
  for (const int64_t bad : {int64_t{-2}, static_cast<int64_t>(rows_count), INT64_MIN, INT64_MAX}) {
    table.rows.back() = bad;
    CHECK(ac_update_rows(&table.update, table.rows.data(), table.rows.size(), 1, nullptr) == AC_INVALID);
    CHECK(table == before);
  }
}

TEST(update_refuses_what_is_no_update) {
  const auto refused = [](auto&& spoil) {
    Table before(AC_RULE_ADAM, 8, AC_FLOAT32, false, 5), table(AC_RULE_ADAM, 8, AC_FLOAT32, false, 5);
    spoil(table.update);
    CHECK(ac_update_rows(&table.update, table.rows.data(), table.rows.size(), 1, nullptr) == AC_INVALID);
    CHECK(table == before);
  };
  refused([](ac_row_update& update) { update.rule = 4; });
  refused([](ac_row_update& update) { update.dim = 0; });
  refused([](ac_row_update& update) { update.second = nullptr; });
  refused([](ac_row_update& update) { update.first = nullptr; });
  refused([](ac_row_update& update) { update.numbers = nullptr; });
  refused([](ac_row_update& update) { update.weight = nullptr; });
  refused([](ac_row_update& update) { update.gradient_float = 3; });
  refused([](ac_row_update& update) { update.mark = 256; });
  refused([](ac_row_update& update) { update.rule = AC_RULE_FTRL, update.rowwise = 1; });
  refused([](ac_row_update& update) { update.rule = AC_RULE_ADAGRAD; });
  CHECK(ac_update_rows(nullptr, nullptr, 0, 1, nullptr) == AC_INVALID);
}
