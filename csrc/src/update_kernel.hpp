// One step of an optimizer on some rows, in one variant per instruction set, chosen once. All give the same bits: every
// operation rounds by itself (csrc/CMakeLists.txt forbids fused ones), and the order of sums is that of asyncckpt.h.
#pragma once

#include <cstdint>

#include "asyncckpt.h"
#include "cpu.hpp"

namespace asyncckpt {

// Update rows[begin, end) of `count`, which are sound. scratch: update_scratch_rows * dim floats of the caller's.
using UpdateKernel = void (*)(const ac_row_update& update, const int64_t* rows, uint64_t begin, uint64_t end,
                              uint64_t count, float* scratch);

constexpr uint64_t update_scratch_rows = 4;

extern const UpdateKernel update_portable;
extern const UpdateKernel update_avx2;
extern const UpdateKernel update_avx512;

UpdateKernel update_kernel(CpuVariant variant) noexcept;

}  // namespace asyncckpt
