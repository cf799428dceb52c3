// ac_fingerprint: the 64-bit fingerprint of every row over all its columns, grain by grain, so that the fingerprints of a
// grain stay in the cache while column after column is chained into them.
#include <algorithm>
#include <atomic>

#include "asyncckpt.h"
#include "digest_kernel.hpp"
#include "error.hpp"
#include "thread_pool.hpp"

namespace asyncckpt {
namespace {

constexpr uint64_t grain_rows = 4096;

void print_rows(const ac_row_column* columns, uint64_t columns_count, uint64_t begin, uint64_t end, uint64_t* prints) {
  const DigestKernel& kernel = digest_kernel();
  std::fill(prints + begin, prints + end, uint64_t{0});
  for (uint64_t index = 0; index < columns_count; ++index) {
    const ac_row_column& column = columns[index];
    const char* first = static_cast<const char*>(column.source) + begin * column.row_bytes;
    kernel.chain_rows(first, column.row_bytes, end - begin, prints + begin);
  }
}

}  // namespace
}  // namespace asyncckpt

extern "C" int32_t ac_fingerprint(const ac_row_column* columns, uint64_t columns_count, uint64_t rows_count,
                                  uint64_t* prints, uint32_t threads, ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    require(columns_count == 0 || columns != nullptr, "columns is NULL");
    require(rows_count == 0 || prints != nullptr, "prints is NULL");
    for (uint64_t index = 0; index < columns_count; ++index) {
      const bool empty = rows_count == 0 || columns[index].row_bytes == 0;
      require(empty || columns[index].source != nullptr, "a column has no source");
    }
    std::atomic<uint64_t> next{0};
    auto work = [&] {
      for (uint64_t begin = next.fetch_add(grain_rows); begin < rows_count; begin = next.fetch_add(grain_rows)) {
        print_rows(columns, columns_count, begin, std::min(begin + grain_rows, rows_count), prints);
      }
    };
    ThreadPool::instance().run(rows_count > grain_rows ? threads : 1, work);
  });
}
