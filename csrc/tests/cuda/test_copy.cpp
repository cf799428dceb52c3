// Segments of every size and alignment arrive, and nothing beside them changes.
#include <algorithm>
#include <memory>

#include "asyncckpt_cuda.h"
#include "check.hpp"
#include "cuda_on_cpu.h"
#include "guarded.hpp"

namespace {

constexpr uint64_t sizes[] = {0,    1,    2,     3,     7,      8,       15,     16,     17,     31,     64,
                              127,  128,  129,   1000,  4095,   4096,    4097,   16'383, 16'384, 16'385, 40'000,
                              65'536, 100'003};

struct Batch {
  std::vector<std::unique_ptr<Guarded>> sources, targets;
  std::vector<ac_segment> segments;

  void add(uint64_t bytes, uint64_t source_shift, uint64_t target_shift) {
    const uint64_t seed = 2 * segments.size();
    sources.push_back(std::make_unique<Guarded>(bytes, source_shift, seed));
    targets.push_back(std::make_unique<Guarded>(bytes, target_shift, seed + 1));
    segments.push_back({sources.back()->data(), targets.back()->data(), bytes});
    targets.back()->expect(0, sources.back()->data(), bytes);
  }

  bool arrived() const {
    return std::all_of(targets.begin(), targets.end(), [](const auto& target) { return target->is_as_expected(); }) &&
           std::all_of(sources.begin(), sources.end(), [](const auto& source) { return source->is_as_expected(); });
  }
};

int32_t copy_batch(const Batch& batch, bool to_device_table = false) {
  const uint64_t bytes = ac_cuda_batch_table_bytes(batch.segments.size());
  // Exactly as long as the header says, so that a sanitizer sees every step beyond.
  const auto table = std::make_unique<uint64_t[]>(bytes / 8), other = std::make_unique<uint64_t[]>(bytes / 8);
  std::memset(other.get(), 0xEE, bytes);
  return ac_cuda_copy_batch(0, batch.segments.data(), batch.segments.size(), table.get(),
                            to_device_table ? other.get() : nullptr, nullptr, nullptr);
}

}  // namespace

TEST(batch_copies_every_size_and_alignment) {
  for (uint64_t seed = 0; seed < 3; ++seed) {
    cuda_on_cpu_seed(seed);
    Batch batch;
    for (const uint64_t bytes : sizes) {
      for (const uint64_t shift : {0, 1, 2, 4, 8, 15, 16, 100, 127}) {
        batch.add(bytes, shift, shift);
        batch.add(bytes, shift, 0);
        batch.add(bytes, 3, shift);
      }
    }
    CHECK(copy_batch(batch, seed == 1) == AC_OK);
    CHECK(batch.arrived());
  }
}

TEST(batch_copies_random_segments) {
  std::mt19937_64 random(seed_of_tests);
  for (int turn = 0; turn < 20; ++turn) {
    Batch batch;
    const uint64_t count = random() % 60;
    for (uint64_t index = 0; index < count; ++index) {
      const uint64_t bytes = random() % 8 == 0 ? random() % 300'000 : random() % 3000;
      batch.add(random() % 5 == 0 ? 0 : bytes, random() % 128, random() % 128);
    }
    CHECK(copy_batch(batch, random() % 2 == 0) == AC_OK);
    CHECK(batch.arrived());
  }
}

TEST(batch_is_one_launch) {
  Batch batch;
  for (int index = 0; index < 3000; ++index) batch.add(static_cast<uint64_t>(index) % 90, 0, 0);
  const uint64_t launches = cuda_on_cpu_launches(), copies = cuda_on_cpu_copies();
  CHECK(copy_batch(batch) == AC_OK);
  CHECK(cuda_on_cpu_launches() == launches + 1 && cuda_on_cpu_copies() == copies);
  CHECK(copy_batch(batch, true) == AC_OK);
  CHECK(cuda_on_cpu_launches() == launches + 2 && cuda_on_cpu_copies() == copies + 1);
  CHECK(batch.arrived());
}

TEST(batch_of_nothing_launches_nothing) {
  Batch batch;
  const uint64_t launches = cuda_on_cpu_launches();
  CHECK(ac_cuda_copy_batch(0, nullptr, 0, nullptr, nullptr, nullptr, nullptr) == AC_OK);
  for (int index = 0; index < 5; ++index) batch.add(0, 0, 0);
  CHECK(copy_batch(batch, true) == AC_OK);
  CHECK(cuda_on_cpu_launches() == launches && batch.arrived());
}

TEST(copy_is_a_call_for_each_segment) {
  Batch batch;
  for (const uint64_t bytes : sizes) batch.add(bytes, 5, 9);
  const uint64_t copies = cuda_on_cpu_copies();
  CHECK(ac_cuda_copy(1, batch.segments.data(), batch.segments.size(), nullptr, nullptr) == AC_OK);
  CHECK(cuda_on_cpu_copies() == copies + batch.segments.size() - 1 && cuda_on_cpu_last_device() == 1);
  CHECK(batch.arrived());
}

TEST(copy_names_the_segment_that_failed) {
  Batch batch;
  for (int index = 0; index < 4; ++index) batch.add(10, 0, 0);
  ac_error error;
  cuda_on_cpu_fail_after(2, 700);
  CHECK(ac_cuda_copy(0, batch.segments.data(), 4, nullptr, &error) == AC_DEVICE);
  CHECK(error.status == AC_DEVICE && error.item == 2 && error.sys_errno == 700);
  CHECK(std::strstr(error.message, "cudaMemcpyAsync: ") == error.message);
  CHECK(std::strstr(error.message, "cudaErrorIllegalAddress") != nullptr);
}

TEST(broken_contracts_of_segments_are_refused) {
  char source[8] = {}, target[8] = {};
  alignas(8) char table[2048];
  const ac_segment sound{source, target, 8}, from_nowhere{nullptr, target, 1};
  const ac_segment nowhere[] = {sound, {source, nullptr, 8}};
  ac_error error;
  const uint64_t launches = cuda_on_cpu_launches(), copies = cuda_on_cpu_copies();
  CHECK(ac_cuda_copy(0, nowhere, 2, nullptr, &error) == AC_INVALID && error.item == 1);
  CHECK(ac_cuda_copy(0, &from_nowhere, 1, nullptr, &error) == AC_INVALID);
  CHECK(ac_cuda_copy(0, nullptr, 1, nullptr, &error) == AC_INVALID);
  CHECK(ac_cuda_copy(-1, &sound, 1, nullptr, &error) == AC_INVALID);
  CHECK(ac_cuda_copy_batch(0, nowhere, 2, table, nullptr, nullptr, &error) == AC_INVALID && error.item == 1);
  CHECK(ac_cuda_copy_batch(0, &sound, 1, nullptr, nullptr, nullptr, &error) == AC_INVALID);
  CHECK(ac_cuda_copy_batch(0, &sound, 1, table + 4, nullptr, nullptr, &error) == AC_INVALID);
  CHECK(ac_cuda_copy_batch(0, &sound, 1, table, table + 1, nullptr, &error) == AC_INVALID);
  CHECK(ac_cuda_copy(7, &sound, 1, nullptr, &error) == AC_DEVICE);
  CHECK(std::strstr(error.message, "cudaErrorInvalidDevice") != nullptr);
  CHECK(cuda_on_cpu_launches() == launches && cuda_on_cpu_copies() == copies);
}
