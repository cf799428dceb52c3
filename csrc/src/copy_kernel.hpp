// The copy kernels: one per instruction set and way of streaming, chosen once.
//
// A kernel copies `bytes` from `source` to `target` with stores that bypass the caches: the source is read and the target
// written once, where ordinary stores also read the target. The way of streaming depends on the memory controller:
//
//   interleaved   four pages at once, a line of each in turn. Intel: 22 GiB/s with two threads, one stream 16, memcpy 13.
//   sequential    one stream. AMD Zen 5: 34 GiB/s with two threads, four streams 21, memcpy 22.
//
// The caller fences once after many kernels.
#pragma once

#include <cstddef>

#include "cpu.hpp"

namespace asyncckpt {

using CopyKernel = void (*)(char* target, const char* source, size_t bytes);

struct CopyWay {
  CopyKernel kernel;
  size_t bytes_min;  // memcpy is as good for less
};

void copy_portable(char* target, const char* source, size_t bytes);
void copy_avx2_interleaved(char* target, const char* source, size_t bytes);
void copy_avx2_sequential(char* target, const char* source, size_t bytes);
void copy_avx512_interleaved(char* target, const char* source, size_t bytes);
void copy_avx512_sequential(char* target, const char* source, size_t bytes);

// The way for this machine.
CopyWay copy_way() noexcept;
// Make the stores of the kernels visible to other threads before anything stored later.
void copy_fence() noexcept;

}  // namespace asyncckpt
