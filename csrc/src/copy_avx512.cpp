#include <immintrin.h>

#include "copy_kernel.hpp"
#include "streaming_copy.hpp"

namespace asyncckpt {
namespace {

struct Line512 {
  __m512i bits;
  void load(const char* from) { bits = _mm512_loadu_si512(from); }
  void stream(char* to) const { _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits); }
};

}  // namespace

void copy_avx512_interleaved(char* target, const char* source, size_t bytes) {
  copy_streaming<Line512, interleaved_runs_count>(target, source, bytes);
}

void copy_avx512_sequential(char* target, const char* source, size_t bytes) {
  copy_streaming<Line512, 1>(target, source, bytes);
}

}  // namespace asyncckpt
