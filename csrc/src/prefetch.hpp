// Ask for memory some time before it is used. Addresses may be wrong: a prefetch never faults.
#pragma once

namespace asyncckpt {

inline void prefetch_to_read(const void* place) { __builtin_prefetch(place, 0); }

// The builtin would only ask for a shared line here; every x86-64 processor knows this one or takes it for nothing.
inline void prefetch_to_write(void* place) {
#if defined(__x86_64__)
  __asm__ volatile("prefetchw %0" : : "m"(*static_cast<const char*>(place)));
#else
  __builtin_prefetch(place, 1);
#endif
}

}  // namespace asyncckpt
