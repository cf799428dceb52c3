#include <immintrin.h>

#include "copy_kernel.hpp"
#include "streaming_copy.hpp"

namespace asyncckpt {
namespace {

struct Line256 {
  __m256i low, high;
  void load(const char* from) {
    low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + 1);
  }
  void stream(char* to) const {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, high);
  }
};

}  // namespace

void copy_avx2_interleaved(char* target, const char* source, size_t bytes) {
  copy_streaming<Line256, interleaved_runs_count>(target, source, bytes);
}

void copy_avx2_sequential(char* target, const char* source, size_t bytes) {
  copy_streaming<Line256, 1>(target, source, bytes);
}

}  // namespace asyncckpt
