// Marks of rows: one byte per row, 0 for a free one.
#pragma once

#include <cstdint>

namespace asyncckpt {

// Set the marks of those rows that have one other than 0. Skips rows from marks_count on, and -1.
void mark_used(uint8_t* marks, uint64_t marks_count, const int64_t* rows, uint64_t count, uint8_t value);

}  // namespace asyncckpt
