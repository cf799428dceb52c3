// ac_cuda_copy_rows and ac_cuda_copy_marked_rows: one kernel that copies rows of many columns.
//
// A row is split into pieces (row_moves.hpp), as wide as its column is aligned. A team of 1 to 32 neighbouring threads,
// enough to take a row's pieces at once, works on rows_in_flight rows together, so that every thread waits for that
// many loads at once; neighbouring teams take neighbouring rows, so that they fill lines of the target together. What a
// block does before it takes new work is a tile: some rows, and of long rows a part. Tiles of all columns are numbered.
#include <algorithm>

#include "device.hpp"
#include "row_moves.hpp"

namespace asyncckpt::cuda {
namespace {

constexpr unsigned rows_in_flight = 4;
constexpr unsigned team_threads_max = 32;
// Of one launch; more than these are launched one group after the other. A kernel takes 4 KiB of parameters.
constexpr unsigned columns_max = 48;
// Rows that are longer are shared among blocks.
constexpr uint64_t tile_pieces_max = 1024;

enum class Way : uint32_t { bytes_16, bytes_8, bytes_4, bytes_2, bytes_1, to_bfloat16, to_bfloat16_vector };

struct Column {
  const char* source;
  char* target;
  uint64_t source_row_bytes;
  uint64_t target_row_bytes;
  uint64_t pieces;     // of a row
  uint64_t tiles_end;  // one past the number of the last tile of this column
  uint64_t row_tiles;  // tiles that share a row
  Way way;
  uint32_t team_threads;
};

struct Work {
  Column columns[columns_max];
  const int64_t* source_rows;  // NULL: row i
  const int64_t* target_rows;  // NULL: row i
  const uint8_t* marks;        // NULL: all rows
  uint64_t count;
  uint64_t tiles_count;
  uint32_t above;
};
static_assert(sizeof(Work) <= 4096);

// Whether there is a row to copy at `index`, and where it is.
__device__ bool find_row(const Work& work, const Column& column, uint64_t index, const char*& source, char*& target) {
  if (index >= work.count) return false;
  if (work.marks != nullptr && work.marks[index] <= work.above) return false;
  const int64_t row = static_cast<int64_t>(index);
  const int64_t source_row = work.source_rows == nullptr ? row : work.source_rows[index];
  const int64_t target_row = work.target_rows == nullptr ? row : work.target_rows[index];
  if ((source_row | target_row) < 0) return false;
  source = column.source + static_cast<uint64_t>(source_row) * column.source_row_bytes;
  target = column.target + static_cast<uint64_t>(target_row) * column.target_row_bytes;
  return true;
}

// By all threads of a block: the pieces [begin, end) of the rows from `first` on that make a tile.
template <class Move>
__device__ void copy_tile(const Work& work, const Column& column, uint64_t first, uint64_t begin, uint64_t end) {
  const unsigned lane = threadIdx.x % column.team_threads;
  const unsigned team = threadIdx.x / column.team_threads;
  const unsigned teams = block_threads / column.team_threads;
  const char* sources[rows_in_flight] = {};
  char* targets[rows_in_flight] = {};
  bool found[rows_in_flight];
#pragma unroll
  for (unsigned turn = 0; turn < rows_in_flight; ++turn) {
    found[turn] = find_row(work, column, first + turn * teams + team, sources[turn], targets[turn]);
  }
  for (uint64_t piece = begin + lane; piece < end; piece += column.team_threads) {
    typename Move::Held held[rows_in_flight] = {};
#pragma unroll
    for (unsigned turn = 0; turn < rows_in_flight; ++turn) {
      if (found[turn]) held[turn] = Move::take(sources[turn] + piece * Move::source_bytes);
    }
#pragma unroll
    for (unsigned turn = 0; turn < rows_in_flight; ++turn) {
      if (found[turn]) Move::put(targets[turn] + piece * Move::target_bytes, held[turn]);
    }
  }
}

__global__ void __launch_bounds__(block_threads) copy_rows(const __grid_constant__ Work work) {
  unsigned index = 0;
  for (uint64_t number = blockIdx.x; number < work.tiles_count; number += gridDim.x) {
    while (number >= work.columns[index].tiles_end) ++index;
    const Column& column = work.columns[index];
    const uint64_t tile = number - (index == 0 ? 0 : work.columns[index - 1].tiles_end);
    const uint64_t first = tile / column.row_tiles * (block_threads / column.team_threads) * rows_in_flight;
    const uint64_t begin = tile % column.row_tiles * tile_pieces_max;
    const uint64_t end = begin + tile_pieces_max < column.pieces ? begin + tile_pieces_max : column.pieces;
    switch (column.way) {
      case Way::bytes_16: copy_tile<AsIs<uint4>>(work, column, first, begin, end); break;
      case Way::bytes_8: copy_tile<AsIs<uint2>>(work, column, first, begin, end); break;
      case Way::bytes_4: copy_tile<AsIs<unsigned int>>(work, column, first, begin, end); break;
      case Way::bytes_2: copy_tile<AsIs<unsigned short>>(work, column, first, begin, end); break;
      case Way::bytes_1: copy_tile<AsIs<unsigned char>>(work, column, first, begin, end); break;
      case Way::to_bfloat16: copy_tile<ToBfloat16>(work, column, first, begin, end); break;
      case Way::to_bfloat16_vector: copy_tile<ToBfloat16Vector>(work, column, first, begin, end); break;
    }
  }
}

uintptr_t bits_of(const void* address) { return reinterpret_cast<uintptr_t>(address); }

Way way_of(const ac_row_column& column, bool cast) {
  if (cast) {
    const bool wide = (bits_of(column.source) | column.row_bytes) % 16 == 0 && bits_of(column.target) % 8 == 0;
    return wide ? Way::to_bfloat16_vector : Way::to_bfloat16;
  }
  switch (vector_bytes_of(bits_of(column.source) | bits_of(column.target) | column.row_bytes)) {
    case 16: return Way::bytes_16;
    case 8: return Way::bytes_8;
    case 4: return Way::bytes_4;
    case 2: return Way::bytes_2;
    default: return Way::bytes_1;
  }
}

// Of the source.
uint64_t piece_bytes_of(Way way) {
  switch (way) {
    case Way::bytes_16:
    case Way::to_bfloat16_vector: return 16;
    case Way::bytes_8: return 8;
    case Way::bytes_4:
    case Way::to_bfloat16: return 4;
    case Way::bytes_2: return 2;
    default: return 1;
  }
}

Column plan(const ac_row_column& column, bool cast, uint64_t count, uint64_t tiles_begin) {
  Column planned{};
  planned.source = static_cast<const char*>(column.source);
  planned.target = static_cast<char*>(column.target);
  planned.source_row_bytes = column.row_bytes;
  planned.target_row_bytes = cast ? column.row_bytes / 2 : column.row_bytes;
  planned.way = way_of(column, cast);
  planned.pieces = column.row_bytes / piece_bytes_of(planned.way);
  planned.team_threads = 1;
  while (planned.team_threads < std::min<uint64_t>(planned.pieces, team_threads_max)) planned.team_threads *= 2;
  planned.row_tiles = (planned.pieces + tile_pieces_max - 1) / tile_pieces_max;
  const uint64_t tile_rows = uint64_t{block_threads / planned.team_threads} * rows_in_flight;
  planned.tiles_end = tiles_begin + (count + tile_rows - 1) / tile_rows * planned.row_tiles;
  return planned;
}

void require_sound(const ac_row_column* columns, const uint8_t* casts, uint64_t columns_count, uint64_t count) {
  require(columns_count == 0 || columns != nullptr, "columns is NULL");
  require(count <= INT64_MAX, "there are too many rows");
  for (uint64_t index = 0; index < columns_count; ++index) {
    const ac_row_column& column = columns[index];
    require(column.row_bytes < INT64_MAX, "a row is too long");
    const bool empty = count == 0 || column.row_bytes == 0;
    require(empty || (column.source != nullptr && column.target != nullptr), "a column has no source or no target");
    const uint8_t cast = casts == nullptr ? AC_CUDA_AS_IS : casts[index];
    require(cast == AC_CUDA_AS_IS || cast == AC_CUDA_TO_BFLOAT16, "there is no such cast");
    if (cast != AC_CUDA_TO_BFLOAT16) continue;
    require(column.row_bytes % 4 == 0, "a row to cast is not made of float32");
    require(bits_of(column.source) % 4 == 0 && bits_of(column.target) % 2 == 0, "a column to cast is not aligned");
  }
}

// Launch what `work` says for all columns that are not empty, columns_max of them at once.
void launch_all(int32_t device, const ac_row_column* columns, const uint8_t* casts, uint64_t columns_count, Work work,
                void* stream) {
  const DeviceScope scope(device);
  uint64_t index = 0;
  while (index < columns_count) {
    unsigned used = 0;
    bool stores_to_host = false;
    work.tiles_count = 0;
    for (; index < columns_count && used < columns_max; ++index) {
      if (columns[index].row_bytes == 0) continue;
      const bool cast = casts != nullptr && casts[index] == AC_CUDA_TO_BFLOAT16;
      work.columns[used] = plan(columns[index], cast, work.count, work.tiles_count);
      work.tiles_count = work.columns[used].tiles_end;
      stores_to_host = stores_to_host || lies_on_host(columns[index].target);
      ++used;
    }
    if (used > 0) launch(copy_rows, choose_blocks(device, work.tiles_count, stores_to_host), stream, work);
  }
}

}  // namespace

void load_copy_rows() { load(copy_rows); }

}  // namespace asyncckpt::cuda

using namespace asyncckpt;
using namespace asyncckpt::cuda;

extern "C" int32_t ac_cuda_copy_rows(int32_t device, const ac_row_column* columns, const uint8_t* casts,
                                     uint64_t columns_count, const int64_t* source_rows, const int64_t* target_rows,
                                     uint64_t count, void* stream, ac_error* error) {
  return at_cuda_border(error, [&] {
    require_sound(columns, casts, columns_count, count);
    require((bits_of(source_rows) | bits_of(target_rows)) % sizeof(int64_t) == 0, "row numbers are not aligned to 8");
    if (count == 0) return;
    Work work{};
    work.source_rows = source_rows;
    work.target_rows = target_rows;
    work.count = count;
    launch_all(device, columns, casts, columns_count, work, stream);
  });
}

extern "C" int32_t ac_cuda_copy_marked_rows(int32_t device, const ac_row_column* columns, const uint8_t* casts,
                                            uint64_t columns_count, const uint8_t* marks, uint8_t above,
                                            uint64_t rows_count, void* stream, ac_error* error) {
  return at_cuda_border(error, [&] {
    require_sound(columns, casts, columns_count, rows_count);
    require(rows_count == 0 || marks != nullptr, "marks is NULL");
    if (rows_count == 0) return;
    Work work{};
    work.marks = marks;
    work.above = above;
    work.count = rows_count;
    launch_all(device, columns, casts, columns_count, work, stream);
  });
}
