// What the processor offers: the instruction set that the kernels use, and the cores we may run on.
#pragma once

#include <cstdint>

namespace asyncckpt {

enum class CpuVariant { portable, avx2, avx512 };

CpuVariant cpu_variant() noexcept;
bool cpu_is_intel() noexcept;
const char* cpu_variant_name(CpuVariant variant) noexcept;

// Cores in the affinity mask of the calling thread, at least one.
uint32_t cores_count() noexcept;

}  // namespace asyncckpt
