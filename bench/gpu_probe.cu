// What the design leans on, measured alone: pinning, copies of the engines and of kernels, queues. bench/gpu_run.sh
// builds and runs it.
//
//   pinning    how long memory is touched and registered, and how long a launch of another thread waits meanwhile
//   borders    what the engine says to copies across two registrations, and across the end of one
//   rates      one long copy by an engine, and by kernels of so many blocks
//   rows up    rows that a kernel reads in host memory, beside one copy up and a kernel that spreads them
//   many       many copies of one size; all in one call, where this CUDA has one
//   queue      how long the host is held behind a busy device, for so many copies
//
// Figures are medians of device time, behind a kernel that spins, so that launches do not count.
#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

constexpr size_t kib = size_t{1} << 10, mib = size_t{1} << 20, gib = size_t{1} << 30;
constexpr size_t memory_bytes = 4 * gib, copy_bytes = 640 * mib, piece_bytes = 16 * kib, row_bytes = 512;
constexpr long long spin_cycles = 20'000'000, long_spin_cycles = 900'000'000;  // Some 10 ms and 0.5 s.
constexpr unsigned threads = 256;
constexpr int rounds = 7;
bool has_failed = false;

void say(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  has_failed = true;
  std::printf("FAILED %s: %s\n", what, cudaGetErrorName(error));
  (void)cudaGetLastError();  // The next call shall not report it again.
}
#define OK(call) say((call), #call)

__global__ void spin(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

// Pieces of 16 KiB, an equal share of neighbouring ones for each block, as csrc/cuda/copy.cu does it.
__global__ void __launch_bounds__(threads) copy_pieces(uint4* target, const uint4* source, size_t count) {
  constexpr unsigned held_count = piece_bytes / sizeof(uint4) / threads;
  const size_t each = (count + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * each;
  for (size_t piece = begin; piece < min(begin + each, count); ++piece) {
    const size_t at = piece * held_count * threads + threadIdx.x;
    uint4 held[held_count];
#pragma unroll
    for (unsigned i = 0; i < held_count; ++i) held[i] = __ldcs(source + at + i * threads);
#pragma unroll
    for (unsigned i = 0; i < held_count; ++i) __stcs(target + at + i * threads, held[i]);
  }
}

// Row i goes to row i * step % count: 32 threads take a row of 512 bytes.
__global__ void __launch_bounds__(threads) spread_rows(uint4* target, const uint4* source, size_t count, size_t step) {
  constexpr size_t width = row_bytes / sizeof(uint4);
  const size_t rows_at_once = size_t{gridDim.x} * threads / width, lane = threadIdx.x % width;
  for (size_t row = (size_t{blockIdx.x} * threads + threadIdx.x) / width; row < count; row += rows_at_once) {
    __stcs(target + row * step % count * width + lane, __ldcs(source + row * width + lane));
  }
}

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

cudaStream_t stream;
char *host, *first, *second;  // memory_bytes each, of the host and of the device.

double gb_per_s(size_t bytes, const std::function<void()>& work) {
  std::vector<float> found;
  for (int round = 0; round < rounds; ++round) {
    cudaEvent_t begin, end;
    OK(cudaEventCreate(&begin));
    OK(cudaEventCreate(&end));
    spin<<<1, 1, 0, stream>>>(spin_cycles);
    OK(cudaEventRecord(begin, stream));
    work();
    OK(cudaEventRecord(end, stream));
    OK(cudaEventSynchronize(end));
    found.push_back(0);
    OK(cudaEventElapsedTime(&found.back(), begin, end));
    OK(cudaEventDestroy(begin));
    OK(cudaEventDestroy(end));
  }
  std::sort(found.begin(), found.end());
  return static_cast<double>(bytes) / found[rounds / 2] / 1e6;
}

void engine(void* target, const void* source, size_t bytes) {
  OK(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, stream));
}

void kernel(void* target, const void* source, size_t bytes, unsigned blocks) {
  copy_pieces<<<blocks, threads, 0, stream>>>(static_cast<uint4*>(target), static_cast<const uint4*>(source),
                                              bytes / piece_bytes);
}

void pin(char* begin, size_t bytes) {
  OK(cudaHostRegister(begin, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
}

void map_host() {
  constexpr size_t huge = 2 * mib;
  void* room = mmap(nullptr, memory_bytes + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) std::printf("FAILED mmap\n"), std::exit(1);
  host = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(room) + huge - 1) / huge * huge);
  madvise(host, memory_bytes, MADV_HUGEPAGE);
  const auto begin = Clock::now();
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> all;
  for (unsigned i = 0; i < cores; ++i) {
    all.emplace_back([=] { std::memset(host + memory_bytes / cores * i, 1, memory_bytes / cores); });
  }
  for (auto& one : all) one.join();
  std::printf("touch 4 GiB on %u cores: %.0f ms\n", cores, ms_since(begin));
}

void measure_pinning() {
  for (const size_t piece : {memory_bytes, 1 * gib, 128 * mib}) {
    std::atomic<bool> is_over{false};
    std::atomic<double> longest{0};
    std::thread other([&] {
      cudaStream_t own;
      OK(cudaStreamCreate(&own));
      while (!is_over) {
        const auto begin = Clock::now();
        spin<<<1, 1, 0, own>>>(1000);
        longest = std::max(longest.load(), ms_since(begin));
        OK(cudaStreamSynchronize(own));
      }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    longest = 0;
    const auto begin = Clock::now();
    for (size_t at = 0; at < memory_bytes; at += piece) pin(host + at, piece);
    const double pinned_ms = ms_since(begin);
    if (piece < memory_bytes) {
      const cudaError_t error = cudaMemcpyAsync(host + piece - 4 * kib, first, 8 * kib, cudaMemcpyDefault, stream);
      std::printf("a copy across two registrations: %s\n", cudaGetErrorName(error));
      (void)cudaGetLastError();
      OK(cudaStreamSynchronize(stream));
    }
    const auto behind = Clock::now();
    for (size_t at = 0; at < memory_bytes; at += piece) OK(cudaHostUnregister(host + at));
    const double unpinned_ms = ms_since(behind);
    is_over = true;
    other.join();
    std::printf("pin 4 GiB in pieces of %zu MiB: %.0f ms, unpin %.0f ms, longest launch beside it %.2f ms\n",
                piece / mib, pinned_ms, unpinned_ms, longest.load());
  }
}

void measure_rates() {
  const cudaError_t error = cudaMemcpyAsync(host + memory_bytes - 4 * kib, first, 8 * kib, cudaMemcpyDefault, stream);
  std::printf("a copy across the end of what is pinned: %s\n", cudaGetErrorName(error));
  (void)cudaGetLastError();
  std::printf("an engine, GB/s: down %.1f, up %.1f, within %.0f\n",
              gb_per_s(copy_bytes, [] { engine(host, first, copy_bytes); }),
              gb_per_s(copy_bytes, [] { engine(first, host, copy_bytes); }),
              gb_per_s(copy_bytes, [] { engine(second, first, copy_bytes); }));
  for (const unsigned blocks : {1u, 2u, 4u, 8u, 16u, 32u, 64u, 132u, 528u, 1056u}) {
    std::printf("kernels of %4u blocks, GB/s: down %.1f, up %.1f, within %.0f\n", blocks,
                gb_per_s(copy_bytes, [=] { kernel(host, first, copy_bytes, blocks); }),
                gb_per_s(copy_bytes, [=] { kernel(first, host, copy_bytes, blocks); }),
                gb_per_s(copy_bytes, [=] { kernel(second, first, copy_bytes, blocks); }));
  }
}

void measure_rows_up() {
  constexpr size_t count = 64 * mib / row_bytes, step = 40'503;  // A window of a load; odd, so every row has one place.
  auto* target = reinterpret_cast<uint4*>(second);
  const auto from = [=](const char* source) {
    spread_rows<<<528, threads, 0, stream>>>(target, reinterpret_cast<const uint4*>(source), count, step);
  };
  std::printf("rows of %zu bytes up, GB/s: read by a kernel %.1f, one copy and a kernel within %.1f\n", row_bytes,
              gb_per_s(count * row_bytes, [=] { from(host); }), gb_per_s(count * row_bytes, [=] {
                engine(first, host, count * row_bytes);
                from(first);
              }));
}

void measure_many() {
  for (const size_t each : {64 * kib, 1 * mib, 8 * mib}) {
    const size_t count = std::min<size_t>(500, memory_bytes / each);  // Less than a stream holds.
    const auto all = [=](char* target) {
      for (size_t i = 0; i < count; ++i) engine(target + i * each, first + i * each, each);
    };
    std::printf("%zu copies of %zu KiB, GB/s: down %.1f, within %.0f\n", count, each / kib,
                gb_per_s(count * each, [=] { all(host); }), gb_per_s(count * each, [=] { all(second); }));
  }
#if CUDART_VERSION >= 13000
  constexpr size_t count = 10'000, each = 64 * kib;
  std::vector<void*> targets(count);
  std::vector<const void*> sources(count);
  std::vector<size_t> sizes(count, each);
  for (size_t i = 0; i < count; ++i) targets[i] = host + i * each, sources[i] = first + i * each;
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t of_all = 0;
  double held_ms = 0;
  const double rate = gb_per_s(count * each, [&] {
    const auto begin = Clock::now();
    OK(cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), count, &attributes, &of_all, 1, stream));
    held_ms = ms_since(begin);
  });
  std::printf("cudaMemcpyBatchAsync of 10,000 copies of 64 KiB: %.1f GB/s, the host is held %.2f ms\n", rate, held_ms);
#endif
}

void measure_queue() {
  for (const int count : {500, 1000, 2000, 4000}) {
    OK(cudaStreamSynchronize(stream));
    spin<<<1, 1, 0, stream>>>(long_spin_cycles);
    const auto begin = Clock::now();
    for (int i = 0; i < count; ++i) engine(host + 4 * kib * i, first + 4 * kib * i, 4 * kib);
    std::printf("%d copies behind a busy device: the host is held %.1f ms\n", count, ms_since(begin));
  }
  OK(cudaStreamSynchronize(stream));
}

}  // namespace

int main() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    std::printf("there is no device to probe: %s\n", cudaGetErrorName(error));
    return 1;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // What is cut off has told what it found.
  OK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, -1));
  OK(cudaMalloc(&first, memory_bytes));
  OK(cudaMalloc(&second, memory_bytes));
  map_host();
  measure_pinning();
  pin(host, memory_bytes);
  measure_rates();
  measure_rows_up();
  measure_many();
  measure_queue();
  return has_failed ? 1 : 0;
}
