#include "cpu.hpp"

#include <sched.h>
#include <unistd.h>

#include "asyncckpt.h"

namespace asyncckpt {

CpuVariant cpu_variant() noexcept {
#if defined(__x86_64__)
  // The compiler's check includes the operating system's support for the wide registers.
  static const CpuVariant variant = __builtin_cpu_supports("avx512f")  ? CpuVariant::avx512
                                    : __builtin_cpu_supports("avx2")   ? CpuVariant::avx2
                                                                       : CpuVariant::portable;
  return variant;
#else
  return CpuVariant::portable;
#endif
}

const char* cpu_variant_name(CpuVariant variant) noexcept {
  switch (variant) {
    case CpuVariant::avx512:
      return "avx512";
    case CpuVariant::avx2:
      return "avx2";
    case CpuVariant::portable:
      break;
  }
  return "portable";
}

uint32_t cores_count() noexcept {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) return static_cast<uint32_t>(CPU_COUNT(&mask));
  // A machine with more cores than the mask holds refuses the call.
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? static_cast<uint32_t>(online) : 1;
}

}  // namespace asyncckpt

extern "C" {

uint32_t ac_abi_version(void) { return AC_ABI_VERSION; }

const char* ac_cpu_variant(void) { return asyncckpt::cpu_variant_name(asyncckpt::cpu_variant()); }

uint32_t ac_cores_count(void) { return asyncckpt::cores_count(); }

}  // extern "C"
