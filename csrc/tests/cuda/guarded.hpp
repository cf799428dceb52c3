// Memory of known content between guard bytes, as far behind a line of 128 bytes as is asked for.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"

constexpr uint64_t guard_bytes = 160;

// The seed of every test; each adds to it what it draws for.
constexpr uint64_t seed_of_tests = 20240607;

class Guarded {
 public:
  Guarded(uint64_t bytes, uint64_t shift, uint64_t seed) : bytes_(bytes), front_(256 + shift) {
    CHECK(posix_memalign(&room_, 128, front_ + bytes + guard_bytes) == 0);
    std::mt19937_64 random(seed_of_tests + seed);
    for (uint64_t at = 0; at < front_ + bytes + guard_bytes; ++at) begin()[at] = static_cast<char>(random());
    before_.assign(begin(), begin() + front_ + bytes + guard_bytes);
  }
  ~Guarded() { std::free(room_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  char* data() const { return begin() + front_; }
  uint64_t bytes() const { return bytes_; }

  // What is there, guards and all, if only expect() changed it.
  void expect(uint64_t at, const void* source, uint64_t bytes) {
    CHECK(at + bytes <= bytes_);
    if (bytes > 0) std::memcpy(before_.data() + front_ + at, source, bytes);
  }
  bool is_as_expected() const { return std::memcmp(before_.data(), begin(), before_.size()) == 0; }

 private:
  char* begin() const { return static_cast<char*>(room_); }

  uint64_t bytes_;
  uint64_t front_;
  void* room_ = nullptr;
  std::vector<char> before_;
};
