// ac_read: files -> memory.
//
// 1. The items become disk reads of at most a block (read_plan.hpp).
// 2. Each thread takes the next disk read. Where one piece can be read straight into its target, it is; otherwise the
//    bytes go to the thread's bounce buffer, which is aligned as O_DIRECT asks, and are copied from there.
// 3. Digests are taken from each tile of the bytes while it is in the cache.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "asyncckpt.h"
#include "digest_kernel.hpp"
#include "error.hpp"
#include "file_io.hpp"
#include "leaves.hpp"
#include "mapping.hpp"
#include "read_plan.hpp"
#include "workers.hpp"

namespace asyncckpt {
namespace {

constexpr uint64_t block_bytes_default = 4 << 20;
constexpr uint64_t bounce_bytes_max = 64 << 20;  // of all threads together
constexpr uint32_t threads_default = 4;
constexpr uint64_t tile_bytes = 64 << 10;
// Below this one read through the bounce buffer beats a straight read and a second one for its last page.
constexpr uint64_t straight_bytes_min = 256 << 10;

class Reader {
 public:
  Reader(const ac_read_item* items, uint64_t count, uint64_t block_bytes, bool digests, uint64_t* bytes_done, Stop& stop)
      : items_(items),
        plan_(plan_reads(items, count, block_bytes)),
        digests_(digests),
        bytes_done_(bytes_done),
        stop_(stop) {
    for (const DiskRead& read : plan_.reads) bounce_bytes_ = std::max(bounce_bytes_, cover_bytes(read));
    if (!digests_) return;
    leaves_.reserve(count);
    for (uint64_t item = 0; item < count; ++item) leaves_.add_span(items[item].bytes);
    leaves_.allocate();
  }

  uint64_t reads_count() const { return plan_.reads.size(); }
  void join_digests(uint8_t* digests) const {
    if (digests_) leaves_.join(kernel_, digests, nullptr);
  }

  // What each thread does.
  void work() {
    Mapping bounce;
    for (;;) {
      const uint64_t index = next_.fetch_add(1);
      if (index >= plan_.reads.size() || stop_.requested()) return stop_.throw_if_cancelled();
      if (!read_straight(plan_.reads[index])) {
        if (bounce.data() == nullptr) bounce = Mapping(bounce_bytes_);
        read_bounced(plan_.reads[index], bounce.data());
      }
    }
  }

 private:
  static uint64_t cover_begin(const DiskRead& read) {
    return read.direct ? round_down(read.begin, AC_PAGE_BYTES) : read.begin;
  }
  static uint64_t cover_bytes(const DiskRead& read) {
    return (read.direct ? round_up(read.end, AC_PAGE_BYTES) : read.end) - cover_begin(read);
  }
  char* target_of(const ReadPiece& piece) const { return static_cast<char*>(items_[piece.item].target) + piece.begin; }

  bool read_straight(const DiskRead& read) {
    const ReadPiece& piece = plan_.pieces[read.first_piece];
    char* target = target_of(piece);
    if (read.pieces_count > 1) return false;
    if (read.direct) {
      const uint64_t crumbs = (reinterpret_cast<uintptr_t>(target) | read.begin) % AC_PAGE_BYTES;
      if (crumbs != 0 || piece.bytes < straight_bytes_min) return false;
    }
    FileIo io(read.fd, read.direct, piece.item);
    const uint64_t whole_pages = read.direct ? round_down(piece.bytes, AC_PAGE_BYTES) : piece.bytes;
    require_count(io.read(target, whole_pages, whole_pages, read.begin), whole_pages, read);
    if (whole_pages < piece.bytes) {
      alignas(AC_PAGE_BYTES) char page[AC_PAGE_BYTES];
      const uint64_t rest = piece.bytes - whole_pages;
      require_count(whole_pages + io.read(page, rest, sizeof page, read.begin + whole_pages), piece.bytes, read);
      std::memcpy(target + whole_pages, page, rest);
    }
    deliver(piece, target);
    return true;
  }

  void read_bounced(const DiskRead& read, char* bounce) {
    FileIo io(read.fd, read.direct, plan_.pieces[read.first_piece].item);
    const uint64_t begin = cover_begin(read);
    const uint64_t count = io.read(bounce, read.end - begin, cover_bytes(read), begin);
    require_count(begin + count < read.begin ? 0 : begin + count - read.begin, read.end - read.begin, read);
    for (uint64_t index = 0; index < read.pieces_count; ++index) {
      const ReadPiece& piece = plan_.pieces[read.first_piece + index];
      deliver(piece, bounce + (items_[piece.item].offset + piece.begin - begin));
    }
  }

  // Raise AC_SHORT when fewer than `needed` bytes of a disk read came, naming the first item that lacks some.
  void require_count(uint64_t count, uint64_t needed, const DiskRead& read) const {
    if (count >= needed) return;
    uint64_t short_item = plan_.pieces[read.first_piece].item;
    for (uint64_t index = 0; index < read.pieces_count; ++index) {
      const ReadPiece& piece = plan_.pieces[read.first_piece + index];
      if (items_[piece.item].offset + piece.begin + piece.bytes > read.begin + count) {
        short_item = piece.item;
        break;
      }
    }
    const ac_read_item& item = items_[short_item];
    const uint64_t end = read.begin + count;
    throw Error(AC_SHORT, 0, short_item, "file ended at offset %llu, %llu bytes before the end of read %llu",
                static_cast<unsigned long long>(end), static_cast<unsigned long long>(item.offset + item.bytes - end),
                static_cast<unsigned long long>(short_item));
  }

  // Take the digests of a piece's leaves and copy it to its target, unless it lies there already.
  void deliver(const ReadPiece& piece, const char* source) {
    char* target = target_of(piece);
    for (uint64_t begin = 0; begin < piece.bytes; begin += AC_LEAF_BYTES) {
      const uint64_t bytes = std::min<uint64_t>(AC_LEAF_BYTES, piece.bytes - begin);
      deliver_leaf(piece.item, (piece.begin + begin) / AC_LEAF_BYTES, target + begin, source + begin, bytes);
    }
    add_progress(bytes_done_, piece.bytes);
  }

  void deliver_leaf(uint64_t item, uint64_t leaf, char* target, const char* source, uint64_t bytes) {
    if (!digests_) {
      if (source != target) std::memcpy(target, source, bytes);
      return;
    }
    DigestState state;
    if (bytes > tile_bytes) kernel_.reset(&state);
    for (uint64_t begin = 0; begin < bytes; begin += tile_bytes) {
      const uint64_t tile = std::min(tile_bytes, bytes - begin);
      if (bytes > tile_bytes) {
        kernel_.update(&state, source + begin, tile);
      } else {
        kernel_.whole(source, bytes, leaves_.leaf(item, leaf));
      }
      if (source != target) std::memcpy(target + begin, source + begin, tile);
    }
    if (bytes > tile_bytes) kernel_.end(&state, leaves_.leaf(item, leaf));
  }

  const DigestKernel& kernel_ = digest_kernel();
  const ac_read_item* items_;
  ReadPlan plan_;
  bool digests_;
  uint64_t* bytes_done_;
  Stop& stop_;
  uint64_t bounce_bytes_ = 0;
  LeafDigests leaves_;
  std::atomic<uint64_t> next_{0};
};

void require_sound(const ac_read_item* items, uint64_t count) {
  require(count == 0 || items != nullptr, "items is NULL");
  for (uint64_t item = 0; item < count; ++item) {
    require(items[item].bytes == 0 || items[item].target != nullptr, "a read has no target");
    require(items[item].bytes < INT64_MAX && items[item].offset < INT64_MAX - items[item].bytes,
            "a read lies out of range");
  }
}

}  // namespace
}  // namespace asyncckpt

extern "C" int32_t ac_read(const ac_read_item* items, uint64_t count, uint8_t* digests, const ac_read_options* options,
                           uint64_t* bytes_done, const int32_t* cancel, ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    require_sound(items, count);
    require(options != nullptr, "options is NULL");
    const uint64_t wished = options->block_bytes == 0 ? block_bytes_default : options->block_bytes;
    const uint64_t block_bytes = std::clamp<uint64_t>(round_down(wished, AC_LEAF_BYTES), AC_LEAF_BYTES, bounce_bytes_max);
    Stop stop(cancel);
    Reader reader(items, count, block_bytes, digests != nullptr, bytes_done, stop);
    const uint64_t wished_threads = options->threads == 0 ? threads_default : options->threads;
    const uint64_t threads = std::max<uint64_t>(
        1, std::min({wished_threads, reader.reads_count(), bounce_bytes_max / block_bytes}));
    auto work = [&] { reader.work(); };
    {
      Workers workers(stop);
      workers.start("asyncckpt-read", static_cast<uint32_t>(threads - 1), work);
      workers.guarded(work);
    }
    stop.rethrow();
    reader.join_digests(digests);
  });
}
