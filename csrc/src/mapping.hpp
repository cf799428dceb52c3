// Anonymous memory straight from the kernel: zero-filled, aligned for huge pages, growing without a copy.
#pragma once

#include <cstddef>
#include <cstdint>

namespace asyncckpt {

constexpr size_t small_page_bytes = 4 << 10;
constexpr size_t huge_page_bytes = 2 << 20;

constexpr uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }
constexpr uint64_t round_down(uint64_t value, uint64_t unit) { return value / unit * unit; }

// Mappings of a huge page or more consist of whole ones; smaller ones of small pages, so that small owners stay small.
constexpr uint64_t mapped_bytes(uint64_t bytes) {
  return round_up(bytes, bytes < huge_page_bytes ? small_page_bytes : huge_page_bytes);
}

// Map, grow or shrink; all sizes are mapped_bytes(...). Throw Error with AC_NO_MEMORY or AC_SYSTEM.
void* map_aligned(size_t bytes);
void* remap_aligned(void* base, size_t old_bytes, size_t new_bytes);
void unmap(void* base, size_t bytes);

// Owns a mapping of its own; move-only.
class Mapping {
 public:
  Mapping() = default;
  explicit Mapping(size_t bytes) : bytes_(mapped_bytes(bytes)) { base_ = map_aligned(bytes_); }
  Mapping(Mapping&& other) noexcept : base_(other.base_), bytes_(other.bytes_) { other.base_ = nullptr, other.bytes_ = 0; }
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  char* data() const { return static_cast<char*>(base_); }
  size_t bytes() const { return bytes_; }
  // Make room for `bytes`; what is there stays, what is new is zero.
  void grow(size_t bytes);

 private:
  void* base_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace asyncckpt
