// How fast the copy kernels are here, beside memcpy in the same round: copy_bench [MiB] [rounds].
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "asyncckpt.h"

namespace {

using Segments = std::vector<ac_segment>;

double seconds_of(auto&& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Segments cut(char* source, char* target, uint64_t bytes, uint64_t piece) {
  Segments segments;
  for (uint64_t at = 0; at < bytes; at += piece) segments.push_back({source + at, target + at, std::min(piece, bytes - at)});
  return segments;
}

// The floor that everybody has: pieces dealt out to threads, memcpy each.
void copy_by_memcpy(const Segments& segments, unsigned threads) {
  std::vector<std::thread> others;
  const auto work = [&](unsigned first) {
    for (size_t index = first; index < segments.size(); index += threads) {
      std::memcpy(segments[index].target, segments[index].source, segments[index].bytes);
    }
  };
  for (unsigned index = 1; index < threads; ++index) others.emplace_back(work, index);
  work(0);
  for (std::thread& other : others) other.join();
}

// Others use the machine too; the best round has met them least.
double best(const std::vector<double>& values) { return *std::min_element(values.begin(), values.end()); }

}  // namespace

int main(int count, char** arguments) {
  const uint64_t bytes = (count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1024) << 20;
  const int rounds = count > 2 ? std::atoi(arguments[2]) : 7;
  void *source = nullptr, *target = nullptr;
  if (ac_memory_map(bytes, &source, nullptr) != AC_OK || ac_memory_map(bytes, &target, nullptr) != AC_OK) return 1;
  std::memset(source, 1, bytes);
  ac_memory_touch(target, 0, bytes, 0, nullptr);
  std::printf("%s, %llu MiB, %d rounds, best of each in GiB/s\n", ac_cpu_variant(), static_cast<unsigned long long>(bytes >> 20), rounds);
  for (const uint64_t piece : {uint64_t{4} << 10, uint64_t{64} << 10, uint64_t{1} << 20, bytes}) {
    const Segments segments = cut(static_cast<char*>(source), static_cast<char*>(target), bytes, piece);
    for (const unsigned threads : {1u, 2u}) {
      std::vector<double> ours, floor;
      for (int round = 0; round < rounds; ++round) {
        ours.push_back(seconds_of([&] { ac_copy(segments.data(), segments.size(), threads, nullptr); }));
        floor.push_back(seconds_of([&] { copy_by_memcpy(segments, threads); }));
      }
      const double gib = static_cast<double>(bytes) / (1 << 30);
      std::printf("pieces of %8llu KiB, %u threads: ac_copy %5.1f  memcpy %5.1f  ratio %.2f\n",
                  static_cast<unsigned long long>(piece >> 10), threads, gib / best(ours), gib / best(floor),
                  best(floor) / best(ours));
    }
  }
  return 0;
}
