// The raw floor: the least that any full save on this machine must do, and nothing else.
// One parallel copy into touched huge pages (non-temporal stores, four 4 KiB pages interleaved), one thread of O_DIRECT writes.
// It shares no line with the library, so that it can be held against it. Every function returns 0 or -errno.
#include <fcntl.h>
#include <immintrin.h>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

struct Piece { const char* source; char* target; uint64_t bytes; };  // target: aligned to 64 bytes

static constexpr uint64_t PAGE = 4096, HUGE = 2u << 20;

static void run(int threads, const std::function<void()>& work) {  // the caller is one of the threads
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back(work);
  work();
  for (auto& other : others) other.join();
}

static inline void stream64(const char* source, char* target) {
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i*)target, _mm512_loadu_si512((const void*)source));
#elif defined(__AVX__)
  _mm256_stream_si256((__m256i*)target, _mm256_loadu_si256((const __m256i*)source));
  _mm256_stream_si256((__m256i*)(target + 32), _mm256_loadu_si256((const __m256i*)(source + 32)));
#else
  memcpy(target, source, 64);
#endif
}

static void copy_piece(const Piece& piece) {
  const char* source = piece.source;
  char* target = piece.target;
  uint64_t left = piece.bytes;
  for (; left >= 4 * PAGE; left -= 4 * PAGE, source += 4 * PAGE, target += 4 * PAGE)
    for (uint64_t line = 0; line < PAGE; line += 64)
      for (uint64_t page = 0; page < 4 * PAGE; page += PAGE) stream64(source + page + line, target + page + line);
  for (; left >= 64; left -= 64, source += 64, target += 64) stream64(source, target);
  memcpy(target, source, left);
}

extern "C" int floor_copy(const Piece* pieces, uint64_t count, int threads, int plain) {
  std::atomic<uint64_t> next{0};
  run(threads, [&] {
    for (uint64_t i; (i = next++) < count;) {
      if (plain) memcpy(pieces[i].target, pieces[i].source, pieces[i].bytes);
      else copy_piece(pieces[i]);
    }
    _mm_sfence();
  });
  return 0;
}

extern "C" void* floor_map(uint64_t bytes, int threads) {  // touched huge pages, never unmapped
  void* raw = mmap(nullptr, bytes + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  char* base = (char*)(((uintptr_t)raw + HUGE - 1) / HUGE * HUGE);
  madvise(base, bytes, MADV_HUGEPAGE);
  std::atomic<uint64_t> next{0};
  run(threads, [&] { for (uint64_t at; (at = next.fetch_add(PAGE)) < bytes;) base[at] = 1; });
  return base;
}

static int open_direct(const char* path, int flags) {
  int fd = open(path, flags | O_DIRECT | O_CLOEXEC, 0644);
  return fd < 0 && errno == EINVAL ? open(path, flags | O_CLOEXEC, 0644) : fd;  // tmpfs has no O_DIRECT
}

extern "C" int floor_write(const char* path, const char* data, uint64_t bytes, uint64_t block) {
  int fd = open_direct(path, O_CREAT | O_EXCL | O_WRONLY);
  if (fd < 0) return -errno;
  int error = 0;
  for (uint64_t at = 0; at < bytes && error == 0;) {
    ssize_t done = pwrite(fd, data + at, bytes - at < block ? bytes - at : block, (off_t)at);
    if (done <= 0) error = -errno; else at += (uint64_t)done;
  }
  if (error == 0 && fsync(fd) != 0) error = -errno;
  close(fd);
  return error;
}

extern "C" int floor_read(const char* path, char* data, uint64_t bytes, uint64_t block, int threads) {
  int fd = open_direct(path, O_RDONLY);
  if (fd < 0) return -errno;
  std::atomic<uint64_t> next{0};
  std::atomic<int> error{0};
  run(threads, [&] {
    for (uint64_t at; (at = next.fetch_add(block)) < bytes;)
      if (pread(fd, data + at, bytes - at < block ? bytes - at : block, (off_t)at) <= 0) error = errno ? -errno : -EIO;
  });
  close(fd);
  return error;
}
