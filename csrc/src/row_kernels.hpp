// Copies the rows of one column: dense ranges in one piece, sparse ones row by row.
//
// A sparse row is a cache miss or two, so the rows some places ahead are fetched while one is copied. How a row is
// copied depends on its size; where its lines are whole ones, stores bypass the caches, as in copy_kernel.hpp.
#pragma once

#include <cstdint>

#include "asyncckpt.h"
#include "copy_kernel.hpp"

namespace asyncckpt {

// Row sources[i] goes to row targets[i].
struct RowPairs {
  const int64_t* sources;
  const int64_t* targets;
  uint64_t count;
};

// Copy the pairs [begin, end), whatever they are; those behind `end` are fetched already. row_bytes > 0.
void copy_sparse_rows(const ac_row_column& column, const RowPairs& pairs, uint64_t begin, uint64_t end,
                      const CopyWay& way);
// Copy the pairs [begin, end), whose rows are neighbours both in the source and in the target. row_bytes > 0.
void copy_dense_rows(const ac_row_column& column, const RowPairs& pairs, uint64_t begin, uint64_t end,
                     const CopyWay& way);

}  // namespace asyncckpt
