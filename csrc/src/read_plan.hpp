// Which disk reads bring in which items.
//
// Items are taken in the order they lie on disk. A long item is cut at leaf boundaries into reads of one block; short
// neighbours join in one read while they and the gaps between them fit into a block. So one thread sees every leaf whole
// and digests it from the bytes it has just read.
#pragma once

#include <cstdint>
#include <vector>

#include "asyncckpt.h"

namespace asyncckpt {

// Bytes [begin, begin + bytes) of an item.
struct ReadPiece {
  uint64_t item;
  uint64_t begin;
  uint64_t bytes;
};

// One disk read: bytes [begin, end) of a file, for pieces [first_piece, first_piece + pieces_count).
struct DiskRead {
  int32_t fd;
  bool direct;
  uint64_t begin;
  uint64_t end;
  uint64_t first_piece;
  uint64_t pieces_count;
};

struct ReadPlan {
  std::vector<ReadPiece> pieces;
  std::vector<DiskRead> reads;
};

// `block_bytes` is a multiple of AC_LEAF_BYTES.
ReadPlan plan_reads(const ac_read_item* items, uint64_t count, uint64_t block_bytes);

}  // namespace asyncckpt
