// The body of every update_<variant>.cpp; the including file defines ASYNCCKPT_UPDATE_KERNEL. Loops over a row are plain
// ones, which the compiler turns into vector instructions.
//
// A row of float32 is updated where it is. One of a half type is widened into scratch memory, updated there, and rounded
// back once. Rows some places ahead are fetched meanwhile.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "prefetch.hpp"
#include "update_kernel.hpp"

namespace asyncckpt {
namespace {

constexpr uint64_t line_bytes = 64;
constexpr uint64_t ahead_bytes = 8192;
constexpr uint64_t ahead_rows_min = 2;
constexpr uint64_t ahead_rows_max = 16;
constexpr uint64_t fetched_bytes_max = 1024;
constexpr uint64_t lanes_count = 16;

// ---- half types: exact to float32, and rounded to nearest, ties to even, back; without branches -------------------

inline float from_bfloat16(uint16_t half) { return std::bit_cast<float>(static_cast<uint32_t>(half) << 16); }

inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

inline float from_float16(uint16_t half) {
  const uint32_t wide = static_cast<uint32_t>(half) << 16;
  const uint32_t twice = wide + wide;
  const float normal = std::bit_cast<float>((twice >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
  const float subnormal = std::bit_cast<float>((twice >> 17) | (126u << 23)) - 0.5f;
  const uint32_t bits = twice < (1u << 27) ? std::bit_cast<uint32_t>(subnormal) : std::bit_cast<uint32_t>(normal);
  return std::bit_cast<float>((wide & 0x80000000u) | bits);
}

inline uint16_t to_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t twice = bits + bits;
  // Too large becomes infinity, and the rest has the exponent that makes the addition below round at the right bit.
  const float scaled = std::fabs(value) * 0x1.0p+112f * 0x1.0p-110f;
  const uint32_t bias = std::max(twice & 0xFF000000u, 0x71000000u);
  const uint32_t sum = std::bit_cast<uint32_t>(std::bit_cast<float>((bias >> 1) + 0x07800000u) + scaled);
  const uint32_t rounded = ((sum >> 13) & 0x7C00u) + (sum & 0x0FFFu);
  return static_cast<uint16_t>(((bits & 0x80000000u) >> 16) | (twice > 0xFF000000u ? 0x7E00u : rounded));
}

inline uint64_t bytes_of(uint32_t kind) { return kind == AC_FLOAT32 ? 4 : 2; }

void widen(uint32_t kind, const void* row, float* wide, uint64_t count) {
  const auto* halves = static_cast<const uint16_t*>(row);
  if (kind == AC_FLOAT16) {
    for (uint64_t at = 0; at < count; ++at) wide[at] = from_float16(halves[at]);
  } else {
    for (uint64_t at = 0; at < count; ++at) wide[at] = from_bfloat16(halves[at]);
  }
}

void narrow(uint32_t kind, const float* wide, void* row, uint64_t count) {
  auto* halves = static_cast<uint16_t*>(row);
  if (kind == AC_FLOAT16) {
    for (uint64_t at = 0; at < count; ++at) halves[at] = to_float16(wide[at]);
  } else {
    for (uint64_t at = 0; at < count; ++at) halves[at] = to_bfloat16(wide[at]);
  }
}

// ---- rules: one row, `dim` numbers wide; see asyncckpt.h ------------------------------------------------------------

struct Row {
  const float* __restrict gradient;
  float* __restrict weight;
  float* __restrict first;
  float* __restrict second;
};

template <bool decays>
inline float decayed(float gradient, float weight, float weight_decay) {
  if constexpr (decays) return gradient + weight_decay * weight;
  return gradient;
}

// Sums that the compiler keeps in registers: the loads of a part of an array wait for the stores of the whole.
using Lanes16 = float __attribute__((vector_size(64)));
using Lanes8 = float __attribute__((vector_size(32)));
using Lanes4 = float __attribute__((vector_size(16)));

inline float sum_of(const Lanes16& lanes) {
  const Lanes8 eight = __builtin_shufflevector(lanes, lanes, 0, 1, 2, 3, 4, 5, 6, 7) +
                       __builtin_shufflevector(lanes, lanes, 8, 9, 10, 11, 12, 13, 14, 15);
  const Lanes4 four =
      __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  const Lanes4 two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
  return two[0] + two[1];
}

template <bool decays>
inline float mean_square(const Row& row, float weight_decay, uint64_t dim) {
  Lanes16 lanes{};
  uint64_t at = 0;
  for (; at + lanes_count <= dim; at += lanes_count) {
    Lanes16 d;
    std::memcpy(&d, row.gradient + at, sizeof d);
    if constexpr (decays) {
      Lanes16 weight;
      std::memcpy(&weight, row.weight + at, sizeof weight);
      d = d + weight_decay * weight;
    }
    lanes += d * d;
  }
  for (uint64_t lane = 0; at + lane < dim; ++lane) {
    const float d = decayed<decays>(row.gradient[at + lane], row.weight[at + lane], weight_decay);
    lanes[lane] += d * d;
  }
  return sum_of(lanes) * static_cast<float>(1.0 / static_cast<double>(dim));
}

template <bool decays>
struct Sgd {
  static constexpr bool rowwise = false;
  const float lr, weight_decay, momentum;
  const bool nesterov;

  explicit Sgd(const float* n) : lr(n[0]), weight_decay(n[1]), momentum(n[2]), nesterov(n[3] != 0) {}

  void operator()(const Row& row, uint64_t dim) const {
    if (momentum == 0) {
      for (uint64_t at = 0; at < dim; ++at) {
        row.weight[at] -= lr * decayed<decays>(row.gradient[at], row.weight[at], weight_decay);
      }
      return;
    }
    for (uint64_t at = 0; at < dim; ++at) {
      const float d = decayed<decays>(row.gradient[at], row.weight[at], weight_decay);
      const float kept = momentum * row.first[at] + d;
      row.first[at] = kept;
      row.weight[at] -= lr * (nesterov ? d + momentum * kept : kept);
    }
  }
};

template <bool decays, bool by_row>
struct Adagrad {
  static constexpr bool rowwise = by_row;
  const float lr, weight_decay, eps;

  explicit Adagrad(const float* n) : lr(n[0]), weight_decay(n[1]), eps(n[2]) {}

  void operator()(const Row& row, uint64_t dim) const {
    if constexpr (by_row) {
      const float sum = *row.first + mean_square<decays>(row, weight_decay, dim);
      *row.first = sum;
      const float rate = lr / (std::sqrt(sum) + eps);
      for (uint64_t at = 0; at < dim; ++at) {
        row.weight[at] -= rate * decayed<decays>(row.gradient[at], row.weight[at], weight_decay);
      }
    } else {
      for (uint64_t at = 0; at < dim; ++at) {
        const float d = decayed<decays>(row.gradient[at], row.weight[at], weight_decay);
        const float sum = row.first[at] + d * d;
        row.first[at] = sum;
        row.weight[at] -= lr * d / (std::sqrt(sum) + eps);
      }
    }
  }
};

// kept: of the weight, where its decay is decoupled; then there is no other.
template <bool decays, bool by_row>
struct Adam {
  static constexpr bool rowwise = by_row;
  const float step, weight_decay, kept, rest1, beta2, rest2, scale, eps;

  explicit Adam(const float* n)
      : step(n[0]), weight_decay(n[1]), kept(n[2]), rest1(n[3]), beta2(n[4]), rest2(n[5]), scale(n[6]), eps(n[7]) {}

  void operator()(const Row& row, uint64_t dim) const {
    if (kept != 1) {
      for (uint64_t at = 0; at < dim; ++at) row.weight[at] = kept * row.weight[at];
    }
    if constexpr (by_row) {
      const float second = beta2 * *row.second + rest2 * mean_square<decays>(row, weight_decay, dim);
      *row.second = second;
      const float rate = step / (std::sqrt(second) * scale + eps);
      for (uint64_t at = 0; at < dim; ++at) {
        const float d = decayed<decays>(row.gradient[at], row.weight[at], weight_decay);
        const float first = row.first[at] + rest1 * (d - row.first[at]);
        row.first[at] = first;
        row.weight[at] -= rate * first;
      }
    } else {
      for (uint64_t at = 0; at < dim; ++at) {
        const float d = decayed<decays>(row.gradient[at], row.weight[at], weight_decay);
        const float first = row.first[at] + rest1 * (d - row.first[at]);
        const float second = beta2 * row.second[at] + rest2 * d * d;
        row.first[at] = first;
        row.second[at] = second;
        row.weight[at] -= step * first / (std::sqrt(second) * scale + eps);
      }
    }
  }
};

struct Ftrl {
  static constexpr bool rowwise = false;
  const float inverse_lr, l1, l2;

  explicit Ftrl(const float* n) : inverse_lr(n[0]), l1(n[1]), l2(n[2]) {}

  void operator()(const Row& row, uint64_t dim) const {
    for (uint64_t at = 0; at < dim; ++at) {
      const float g = row.gradient[at];
      const float sum = row.first[at] + g * g;
      const float root = std::sqrt(sum);
      const float z = row.second[at] + g - (root - std::sqrt(row.first[at])) * inverse_lr * row.weight[at];
      row.first[at] = sum;
      row.second[at] = z;
      const float q = root * inverse_lr + l2;
      const float clipped = z > l1 ? l1 : z < -l1 ? -l1 : z;
      const float moved = (clipped - z) / q;
      row.weight[at] = q > 0 ? moved : row.weight[at];
    }
  }
};

// ---- rows -----------------------------------------------------------------------------------------------------------

// A column of weights or slots. wide: where a row of a half type is widened.
struct Column {
  char* data;
  uint64_t width;
  uint64_t row_bytes;
  uint32_t kind;
  float* wide;

  Column(void* data, uint32_t kind, uint64_t width, float* wide)
      : data(static_cast<char*>(data)), width(width), row_bytes(width * bytes_of(kind)), kind(kind), wide(wide) {}

  char* at(int64_t row) const { return data + static_cast<uint64_t>(row) * row_bytes; }

  void fetch(int64_t row) const {
    char* begin = at(row);
    const uint64_t bytes = std::min(row_bytes, fetched_bytes_max);
    for (uint64_t offset = 0; offset < bytes; offset += line_bytes) prefetch_to_write(begin + offset);
    prefetch_to_write(begin + bytes - 1);
  }

  float* open(int64_t row) const {
    if (kind == AC_FLOAT32) return reinterpret_cast<float*>(at(row));
    widen(kind, at(row), wide, width);
    return wide;
  }

  void close(int64_t row) const {
    if (kind != AC_FLOAT32) narrow(kind, wide, at(row), width);
  }
};

template <uint64_t fixed_dim, class Rule>
void update_each(const Rule& rule, const ac_row_update& update, const int64_t* rows, uint64_t begin, uint64_t end,
                 uint64_t count, float* scratch) {
  const uint64_t dim = fixed_dim == 0 ? update.dim : fixed_dim;
  const bool has_first = update.first != nullptr, has_second = update.second != nullptr;
  const Column weight(update.weight, update.weight_float, dim, scratch + dim);
  const Column first(update.first, update.first_float, Rule::rowwise && !has_second ? 1 : dim, scratch + 2 * dim);
  const Column second(update.second, update.second_float, Rule::rowwise ? 1 : dim, scratch + 3 * dim);
  const uint64_t gradient_bytes = dim * bytes_of(update.gradient_float);
  const uint64_t row_bytes = weight.row_bytes + first.row_bytes * has_first + second.row_bytes * has_second;
  const uint64_t ahead = std::clamp(ahead_bytes / row_bytes, ahead_rows_min, ahead_rows_max);
  for (uint64_t index = begin; index < end; ++index) {
    const int64_t next = rows[std::min(index + ahead, count - 1)];
    if (next >= 0) {
      weight.fetch(next);
      if (has_first) first.fetch(next);
      if (has_second) second.fetch(next);
      if (update.marks != nullptr) prefetch_to_write(update.marks + next);
    }
    const int64_t row = rows[index];
    if (row < 0) continue;
    if (update.marks != nullptr) update.marks[row] = static_cast<uint8_t>(update.mark);
    const char* gradient = static_cast<const char*>(update.gradient) + index * gradient_bytes;
    if (update.gradient_float != AC_FLOAT32) widen(update.gradient_float, gradient, scratch, dim);
    const float* wide_gradient =
        update.gradient_float == AC_FLOAT32 ? reinterpret_cast<const float*>(gradient) : scratch;
    rule(Row{wide_gradient, weight.open(row), has_first ? first.open(row) : nullptr,
             has_second ? second.open(row) : nullptr},
         dim);
    weight.close(row);
    if (has_first) first.close(row);
    if (has_second) second.close(row);
  }
}

template <class Rule>
void update_by(const ac_row_update& update, const int64_t* rows, uint64_t begin, uint64_t end, uint64_t count,
               float* scratch) {
  const Rule rule(update.numbers);
  // With the usual widths known, loops over a row have neither a beginning nor an end apart.
  if (update.dim == 16) return update_each<16>(rule, update, rows, begin, end, count, scratch);
  if (update.dim == 32) return update_each<32>(rule, update, rows, begin, end, count, scratch);
  if (update.dim == 64) return update_each<64>(rule, update, rows, begin, end, count, scratch);
  if (update.dim == 128) return update_each<128>(rule, update, rows, begin, end, count, scratch);
  update_each<0>(rule, update, rows, begin, end, count, scratch);
}

void update_rows(const ac_row_update& update, const int64_t* rows, uint64_t begin, uint64_t end, uint64_t count,
                 float* scratch) {
  const auto by = [&]<class Rule>() { update_by<Rule>(update, rows, begin, end, count, scratch); };
  const bool decays = update.numbers[1] != 0, by_row = update.rowwise != 0;
  switch (update.rule) {
    case AC_RULE_SGD:
      return decays ? by.template operator()<Sgd<true>>() : by.template operator()<Sgd<false>>();
    case AC_RULE_ADAGRAD:
      if (by_row && decays) return by.template operator()<Adagrad<true, true>>();
      if (by_row) return by.template operator()<Adagrad<false, true>>();
      return decays ? by.template operator()<Adagrad<true, false>>() : by.template operator()<Adagrad<false, false>>();
    case AC_RULE_ADAM:
      if (by_row && decays) return by.template operator()<Adam<true, true>>();
      if (by_row) return by.template operator()<Adam<false, true>>();
      return decays ? by.template operator()<Adam<true, false>>() : by.template operator()<Adam<false, false>>();
    default:
      return by.template operator()<Ftrl>();
  }
}

}  // namespace

const UpdateKernel ASYNCCKPT_UPDATE_KERNEL = update_rows;

}  // namespace asyncckpt
