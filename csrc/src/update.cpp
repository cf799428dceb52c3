// ac_update_rows: one step of an optimizer on some rows. The rows are checked first, so that a wrong one changes nothing.
#include <algorithm>
#include <atomic>
#include <vector>

#include "asyncckpt.h"
#include "error.hpp"
#include "thread_pool.hpp"
#include "update_kernel.hpp"

namespace asyncckpt {
namespace {

// Work that a thread takes at once, and what is too little for a second thread to wake up in time.
constexpr uint64_t slice_bytes = 256 << 10;
constexpr uint64_t parallel_bytes_min = 1 << 20;
constexpr uint64_t dim_max = 1 << 24;

void require_sound(const ac_row_update* update, const int64_t* rows, uint64_t count) {
  require(update != nullptr, "update is NULL");
  require(update->rule <= AC_RULE_FTRL, "the rule of an update is unknown");
  require(update->numbers != nullptr, "the numbers of an update are NULL");
  require(update->dim >= 1 && update->dim <= dim_max, "dim of an update is out of range");
  for (uint32_t kind : {update->gradient_float, update->weight_float, update->first_float, update->second_float}) {
    require(kind <= AC_BFLOAT16, "a type of number is unknown");
  }
  require(update->mark <= 255, "a mark is above 255");
  const bool has_first = update->rule != AC_RULE_SGD || update->numbers[2] != 0;
  const bool has_second = update->rule == AC_RULE_ADAM || update->rule == AC_RULE_FTRL;
  const bool may_be_rowwise = update->rule == AC_RULE_ADAGRAD || update->rule == AC_RULE_ADAM;
  require(update->rowwise == 0 || may_be_rowwise, "the rule has no row-wise form");
  require((update->second != nullptr) == has_second && (update->first != nullptr) == has_first,
          "the slots are not those of the rule");
  require(count == 0 || (rows != nullptr && update->gradient != nullptr && update->weight != nullptr),
          "rows, gradient or weight is NULL");
  bool outside = false;
  // -1 becomes 0, and every other negative row a number greater than any count.
  for (uint64_t index = 0; index < count; ++index) {
    outside |= static_cast<uint64_t>(rows[index]) + 1 > update->rows_count;
  }
  require(!outside, "a row to update is neither -1 nor one of the rows");
}

}  // namespace

UpdateKernel update_kernel(CpuVariant variant) noexcept {
#if defined(__x86_64__)
  if (variant == CpuVariant::avx512) return update_avx512;
  if (variant == CpuVariant::avx2) return update_avx2;
#endif
  (void)variant;
  return update_portable;
}

}  // namespace asyncckpt

extern "C" int32_t ac_update_rows(const ac_row_update* update, const int64_t* rows, uint64_t count, uint32_t threads,
                                  ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    require_sound(update, rows, count);
    const UpdateKernel kernel = update_kernel(cpu_variant());
    const uint64_t row_bytes = update->dim * sizeof(float) * (1 + (update->first != nullptr) + (update->second != nullptr));
    const uint64_t slice = std::max<uint64_t>(1, slice_bytes / row_bytes);
    // Scratch memory for all threads that may come, taken before anything changes; `run` has no more than the slices.
    const uint64_t slices = (count + slice - 1) / slice;
    const bool parallel = count * row_bytes >= parallel_bytes_min;
    const uint64_t threads_max = parallel ? std::min<uint64_t>(threads == 0 ? cores_count() : threads, slices) : 1;
    std::vector<float> scratch(threads_max * update_scratch_rows * update->dim);
    std::atomic<uint64_t> next{0}, thread{0};
    auto work = [&] {
      float* own = scratch.data() + thread.fetch_add(1) * update_scratch_rows * update->dim;
      for (uint64_t begin = next.fetch_add(slice); begin < count; begin = next.fetch_add(slice)) {
        kernel(*update, rows, begin, std::min(begin + slice, count), count, own);
      }
    };
    ThreadPool::instance().run(static_cast<uint32_t>(std::max<uint64_t>(threads_max, 1)), work);
  });
}
