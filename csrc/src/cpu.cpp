#include "cpu.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <sched.h>
#include <unistd.h>

#include "asyncckpt.h"

namespace asyncckpt {

#if defined(__x86_64__)
namespace {

// What the system keeps of a thread's registers, and the feature in leaf 7 of cpuid. Not __builtin_cpu_supports: the
// runtime of zig, which builds the wheel, knows no features.
constexpr uint32_t avx_state = 0x6, avx512_state = 0xe6;

bool has(uint32_t state, uint32_t feature) noexcept {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0) return false;
  uint32_t kept = 0;
  __asm__ volatile("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
  return (kept & state) == state && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & feature) != 0;
}

}  // namespace
#endif

CpuVariant cpu_variant() noexcept {
#if defined(__x86_64__)
  static const CpuVariant variant = has(avx512_state, bit_AVX512F) ? CpuVariant::avx512
                                    : has(avx_state, bit_AVX2)     ? CpuVariant::avx2
                                                                   : CpuVariant::portable;
  return variant;
#else
  return CpuVariant::portable;
#endif
}

bool cpu_is_intel() noexcept {
#if defined(__x86_64__)
  uint32_t a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0, &a, &b, &c, &d) != 0 && b == signature_INTEL_ebx && c == signature_INTEL_ecx;
#else
  return false;
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
