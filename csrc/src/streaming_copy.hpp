// The body that the vector kernels share. Included only by translation units that are compiled for one instruction set,
// so it uses nothing from the standard library that could be merged with another unit's copy.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace asyncckpt {
namespace {

constexpr size_t line_bytes = 64;
constexpr size_t page_bytes = 4096;
constexpr size_t interleaved_runs_count = 4;

// Copy `runs_count` runs of `run_bytes` that lie behind each other, a line of each in turn.
template <class Line, size_t runs_count>
inline void copy_runs(char* target, const char* source, size_t run_bytes) {
  for (size_t offset = 0; offset < run_bytes; offset += line_bytes) {
    Line lines[runs_count];
    for (size_t run = 0; run < runs_count; ++run) lines[run].load(source + run * run_bytes + offset);
    for (size_t run = 0; run < runs_count; ++run) lines[run].stream(target + run * run_bytes + offset);
  }
}

template <class Line, size_t runs_count>
inline void copy_streaming(char* target, const char* source, size_t bytes) {
  // Streaming stores are whole lines of the target; what lies before the first and behind the last is copied as usual.
  const size_t head = -reinterpret_cast<uintptr_t>(target) % line_bytes;
  if (bytes < head + runs_count * line_bytes) {
    memcpy(target, source, bytes);
    return;
  }
  memcpy(target, source, head);
  target += head, source += head, bytes -= head;
  for (; bytes >= runs_count * page_bytes; bytes -= runs_count * page_bytes) {
    copy_runs<Line, runs_count>(target, source, page_bytes);
    target += runs_count * page_bytes, source += runs_count * page_bytes;
  }
  const size_t run_bytes = bytes / (runs_count * line_bytes) * line_bytes;
  copy_runs<Line, runs_count>(target, source, run_bytes);
  memcpy(target + runs_count * run_bytes, source + runs_count * run_bytes, bytes - runs_count * run_bytes);
}

}  // namespace
}  // namespace asyncckpt
