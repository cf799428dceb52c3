// Digests of spans, leaf by leaf, so that several threads share one long span.
//
// LeafDigests holds the digests of the leaves and joins them per span at the end. LeafQueue hands the leaves of spans in
// memory to threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "asyncckpt.h"
#include "digest_kernel.hpp"

namespace asyncckpt {

constexpr uint64_t leaves_count(uint64_t bytes) { return (bytes + AC_LEAF_BYTES - 1) / AC_LEAF_BYTES; }

class LeafDigests {
 public:
  LeafDigests() : first_leaf_{0} {}
  // Announce the next span; all spans are added before any leaf is set.
  void reserve(uint64_t spans_count) { first_leaf_.reserve(spans_count + 1); }
  void add_span(uint64_t bytes) { first_leaf_.push_back(first_leaf_.back() + leaves_count(bytes)); }
  void allocate() { digests_.resize(first_leaf_.back() * AC_DIGEST_BYTES); }

  // Different leaves may be written by different threads at once.
  uint8_t* leaf(uint64_t span, uint64_t index) {
    return digests_.data() + (first_leaf_[span] + index) * AC_DIGEST_BYTES;
  }
  // Write the digest of every span, once all its leaves are there, and theirs where `leaves` is not NULL.
  void join(const DigestKernel& kernel, uint8_t* digests, uint8_t* leaves) const;

 private:
  std::vector<uint64_t> first_leaf_;
  std::vector<uint8_t> digests_;
};

class LeafQueue {
 public:
  LeafQueue(const ac_span* spans, uint64_t count);

  // Digest leaves until none is left or `stopped()` says so; any number of threads at once.
  template <class Stopped>
  void work(Stopped&& stopped) {
    Place place;
    while (!stopped() && claim(place)) digest_from(place);
  }
  // After every worker has returned.
  void join(uint8_t* digests, uint8_t* leaves) const { leaves_.join(kernel_, digests, leaves); }

 private:
  struct Place {
    uint64_t span;
    uint64_t leaf;
    uint64_t spans_end;  // whole spans up to here, when they are small
  };

  bool claim(Place& place);
  void digest_from(const Place& place);
  void digest_leaf(uint64_t span, uint64_t leaf);

  const DigestKernel& kernel_;
  const ac_span* spans_;
  uint64_t count_;
  LeafDigests leaves_;
  std::mutex guard_;
  uint64_t next_span_ = 0;
  uint64_t next_leaf_ = 0;
};

}  // namespace asyncckpt
