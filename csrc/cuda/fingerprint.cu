// ac_cuda_fingerprint: one thread for every row, column after column, each fingerprint the seed of the next.
//
// Threads of a warp read words that lie a row apart; the sectors they touch stay in the first-level cache until the
// rows are through, so memory is read once.
#include "device.hpp"
#include "vectors.hpp"
#include "xxh3.hpp"

namespace asyncckpt::cuda {
namespace {

// Of one launch; a further one continues with the fingerprints of the one before.
constexpr unsigned columns_max = 96;

struct Column {
  const char* source;
  uint64_t row_bytes;
  uint64_t alignment;
};

struct Rows {
  Column columns[columns_max];
  uint64_t columns_count;
  uint64_t rows_count;
  uint64_t* prints;
  bool goes_on;
};
static_assert(sizeof(Rows) <= 4096);

__device__ uint64_t print_of(const Column& column, uint64_t row, uint64_t seed) {
  const char* source = column.source + row * column.row_bytes;
  switch (column.alignment) {
    case 16: return Xxh3<16>::hash(source, column.row_bytes, seed);
    case 8: return Xxh3<8>::hash(source, column.row_bytes, seed);
    case 4: return Xxh3<4>::hash(source, column.row_bytes, seed);
    default: return Xxh3<1>::hash(source, column.row_bytes, seed);
  }
}

__global__ void __launch_bounds__(block_threads) print_rows(const __grid_constant__ Rows rows) {
  const uint64_t step = uint64_t{gridDim.x} * block_threads;
  for (uint64_t row = uint64_t{blockIdx.x} * block_threads + threadIdx.x; row < rows.rows_count; row += step) {
    uint64_t print = rows.goes_on ? rows.prints[row] : 0;
    for (uint64_t index = 0; index < rows.columns_count; ++index) print = print_of(rows.columns[index], row, print);
    rows.prints[row] = print;
  }
}

Column plan(const ac_row_column& column) {
  const char* source = static_cast<const char*>(column.source);
  const unsigned alignment = vector_bytes_of(reinterpret_cast<uintptr_t>(source) | column.row_bytes);
  return {source, column.row_bytes, alignment >= 4 ? alignment : 1};
}

}  // namespace

void load_fingerprint() { load(print_rows); }

}  // namespace asyncckpt::cuda

using namespace asyncckpt;
using namespace asyncckpt::cuda;

extern "C" int32_t ac_cuda_fingerprint(int32_t device, const ac_row_column* columns, uint64_t columns_count,
                                       uint64_t rows_count, uint64_t* prints, void* stream, ac_error* error) {
  return at_cuda_border(error, [&] {
    require(columns_count == 0 || columns != nullptr, "columns is NULL");
    require(rows_count == 0 || prints != nullptr, "prints is NULL");
    require(reinterpret_cast<uintptr_t>(prints) % sizeof(uint64_t) == 0, "prints is not aligned to 8");
    for (uint64_t index = 0; index < columns_count; ++index) {
      const bool empty = rows_count == 0 || columns[index].row_bytes == 0;
      require(empty || columns[index].source != nullptr, "a column has no source");
    }
    if (rows_count == 0) return;
    const DeviceScope scope(device);
    Rows rows{};
    rows.rows_count = rows_count;
    rows.prints = prints;
    const uint64_t tiles = (rows_count - 1) / block_threads + 1;
    const unsigned blocks = choose_blocks(device, tiles, lies_on_host(prints));
    uint64_t index = 0;
    // Without columns every fingerprint is 0, and a launch writes that too.
    do {
      for (rows.columns_count = 0; index < columns_count && rows.columns_count < columns_max; ++index) {
        rows.columns[rows.columns_count++] = plan(columns[index]);
      }
      launch(print_rows, blocks, stream, rows);
      rows.goes_on = true;
    } while (index < columns_count);
  });
}
