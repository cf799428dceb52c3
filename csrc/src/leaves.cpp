#include "leaves.hpp"

#include <algorithm>

namespace asyncckpt {

void LeafDigests::join(const DigestKernel& kernel, uint8_t* digests, uint8_t* leaves) const {
  for (uint64_t span = 0; span + 1 < first_leaf_.size(); ++span) {
    const uint64_t count = first_leaf_[span + 1] - first_leaf_[span];
    const uint8_t* first = digests_.data() + first_leaf_[span] * AC_DIGEST_BYTES;
    kernel.whole(first, count * AC_DIGEST_BYTES, digests + span * AC_DIGEST_BYTES);
  }
  if (leaves != nullptr) std::copy(digests_.begin(), digests_.end(), leaves);
}

LeafQueue::LeafQueue(const ac_span* spans, uint64_t count)
    : kernel_(digest_kernel()), spans_(spans), count_(count) {
  leaves_.reserve(count);
  for (uint64_t span = 0; span < count; ++span) leaves_.add_span(spans[span].bytes);
  leaves_.allocate();
}

// One leaf of a long span, or as many short spans as make one leaf.
bool LeafQueue::claim(Place& place) {
  const std::lock_guard lock(guard_);
  if (next_span_ == count_) return false;
  place = {next_span_, next_leaf_, next_span_};
  if (leaves_count(spans_[next_span_].bytes) > 1) {
    if (++next_leaf_ == leaves_count(spans_[next_span_].bytes)) ++next_span_, next_leaf_ = 0;
    return true;
  }
  for (uint64_t bytes = 0; next_span_ < count_ && bytes < AC_LEAF_BYTES; ++next_span_) {
    if (leaves_count(spans_[next_span_].bytes) > 1) break;
    bytes += spans_[next_span_].bytes + 1;
  }
  place.spans_end = next_span_;
  return true;
}

void LeafQueue::digest_from(const Place& place) {
  if (place.spans_end == place.span) return digest_leaf(place.span, place.leaf);
  for (uint64_t span = place.span; span < place.spans_end; ++span) {
    if (spans_[span].bytes > 0) digest_leaf(span, 0);
  }
}

void LeafQueue::digest_leaf(uint64_t span, uint64_t leaf) {
  const uint64_t begin = leaf * AC_LEAF_BYTES;
  const uint64_t bytes = std::min<uint64_t>(AC_LEAF_BYTES, spans_[span].bytes - begin);
  kernel_.whole(static_cast<const char*>(spans_[span].data) + begin, bytes, leaves_.leaf(span, leaf));
}

}  // namespace asyncckpt
