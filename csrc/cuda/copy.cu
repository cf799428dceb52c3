// ac_cuda_copy: large segments, by the copy engines. ac_cuda_copy_batch: many segments, by one kernel.
//
// A segment is cut into chunks of chunk_bytes, counted from the line of memory in which its target begins, so that
// chunks end where lines do. The chunks of all segments are numbered, and every block takes an equal share of
// neighbouring ones. The table says where they are:
//
//   segments      count
//   chunk_ends    count: one past the number of the last chunk of the segment
//   first         blocks_max: the segment in which the chunks of a block begin
#include <algorithm>

#include "device.hpp"
#include "vectors.hpp"

namespace asyncckpt::cuda {
namespace {

// Host memory is written over the bus in whole lines where targets allow it.
constexpr uint64_t line_bytes = 128;
constexpr unsigned vectors_in_flight = 4;
constexpr uint64_t chunk_bytes = uint64_t{block_threads} * vectors_in_flight * vector_bytes_max;

struct Batch {
  const ac_segment* segments;
  const uint64_t* chunk_ends;
  const uint64_t* first;
  uint64_t chunks_count;
  uint64_t chunks_per_block;
};

// One past the number of the chunk that holds the last byte, where a segment's first chunk is 0.
uint64_t chunks_of(const ac_segment& segment) {
  if (segment.bytes == 0) return 0;
  const uint64_t lead = reinterpret_cast<uintptr_t>(segment.target) % line_bytes;
  return (lead + segment.bytes + chunk_bytes - 1) / chunk_bytes;
}

__device__ void copy_byte(char* target, const char* source) { store(target, load<unsigned char>(source)); }

// By all threads of a block. Where the target is aligned to Vector, the source is too.
template <class Vector>
__device__ void copy_span(char* target, const char* source, uint64_t bytes) {
  constexpr uint64_t width = sizeof(Vector);
  const uint64_t unaligned = (0 - reinterpret_cast<uintptr_t>(target)) % width;
  const uint64_t head = unaligned < bytes ? unaligned : bytes;
  const uint64_t vectors = (bytes - head) / width;
  const uint64_t tail = head + vectors * width;
  if (threadIdx.x < head) copy_byte(target + threadIdx.x, source + threadIdx.x);
  if (threadIdx.x < bytes - tail) copy_byte(target + tail + threadIdx.x, source + tail + threadIdx.x);
  for (uint64_t first = threadIdx.x; first < vectors; first += block_threads * vectors_in_flight) {
    Vector held[vectors_in_flight] = {};
#pragma unroll
    for (unsigned turn = 0; turn < vectors_in_flight; ++turn) {
      const uint64_t index = first + turn * block_threads;
      if (index < vectors) held[turn] = load<Vector>(source + head + index * width);
    }
#pragma unroll
    for (unsigned turn = 0; turn < vectors_in_flight; ++turn) {
      const uint64_t index = first + turn * block_threads;
      if (index < vectors) store(target + head + index * width, held[turn]);
    }
  }
}

__device__ void copy_chunk(const ac_segment& segment, uint64_t chunk) {
  // Bytes are counted from the line in which the target begins.
  const uint64_t lead = reinterpret_cast<uintptr_t>(segment.target) % line_bytes;
  const uint64_t last = lead + segment.bytes;
  const uint64_t begin = chunk == 0 ? lead : chunk * chunk_bytes;
  const uint64_t end = (chunk + 1) * chunk_bytes < last ? (chunk + 1) * chunk_bytes : last;
  char* target = static_cast<char*>(segment.target) + (begin - lead);
  const char* source = static_cast<const char*>(segment.source) + (begin - lead);
  const uint64_t bytes = end - begin;
  switch (vector_bytes_of(reinterpret_cast<uintptr_t>(target) - reinterpret_cast<uintptr_t>(source))) {
    case 16: return copy_span<uint4>(target, source, bytes);
    case 8: return copy_span<uint2>(target, source, bytes);
    case 4: return copy_span<unsigned int>(target, source, bytes);
    case 2: return copy_span<unsigned short>(target, source, bytes);
    default: return copy_span<unsigned char>(target, source, bytes);
  }
}

__global__ void __launch_bounds__(block_threads) copy_chunks(const __grid_constant__ Batch batch) {
  uint64_t chunk = blockIdx.x * batch.chunks_per_block;
  if (chunk >= batch.chunks_count) return;
  const uint64_t rest = batch.chunks_count - chunk;
  const uint64_t end = chunk + (batch.chunks_per_block < rest ? batch.chunks_per_block : rest);
  uint64_t at = batch.first[blockIdx.x];
  uint64_t begin = at == 0 ? 0 : batch.chunk_ends[at - 1];
  while (chunk < end) {
    const ac_segment segment = batch.segments[at];
    const uint64_t segment_end = batch.chunk_ends[at];
    for (; chunk < segment_end && chunk < end; ++chunk) copy_chunk(segment, chunk - begin);
    begin = segment_end;
    ++at;
  }
}

class Table {
 public:
  Table(void* base, uint64_t count)
      : count_(count), segments_(static_cast<ac_segment*>(base)),
        chunk_ends_(reinterpret_cast<uint64_t*>(segments_ + count)), first_(chunk_ends_ + count) {}

  // Returns how many chunks there are.
  uint64_t fill(const ac_segment* segments) {
    uint64_t chunks_count = 0;
    for (uint64_t index = 0; index < count_; ++index) {
      segments_[index] = segments[index];
      chunks_count += chunks_of(segments[index]);
      chunk_ends_[index] = chunks_count;
    }
    return chunks_count;
  }

  // Chunks are there for each of the blocks, but perhaps for the last ones.
  void share(unsigned blocks, uint64_t chunks_per_block) {
    uint64_t at = 0;
    for (unsigned block = 0; block < blocks; ++block) {
      while (at < count_ && chunk_ends_[at] <= block * chunks_per_block) ++at;
      first_[block] = at;
    }
  }

  // The same table in other memory, as the kernel shall see it.
  static Batch seen_at(void* base, uint64_t count, uint64_t chunks_count, uint64_t chunks_per_block) {
    const Table table(base, count);
    return {table.segments_, table.chunk_ends_, table.first_, chunks_count, chunks_per_block};
  }

 private:
  uint64_t count_;
  ac_segment* segments_;
  uint64_t* chunk_ends_;
  uint64_t* first_;
};

void require_sound(const ac_segment* segments, uint64_t count) {
  require(count == 0 || segments != nullptr, "segments is NULL");
  for (uint64_t index = 0; index < count; ++index) {
    const ac_segment& segment = segments[index];
    if (segment.bytes > 0 && (segment.source == nullptr || segment.target == nullptr)) {
      throw Error(AC_INVALID, 0, index, "a segment has no source or no target");
    }
  }
}

bool first_lies_on_host(const ac_segment* segments, uint64_t count) {
  const ac_segment* end = segments + count;
  const ac_segment* first = std::find_if(segments, end, [](const ac_segment& segment) { return segment.bytes > 0; });
  return first != end && lies_on_host(first->target);
}

}  // namespace

void load_copy() { load(copy_chunks); }

}  // namespace asyncckpt::cuda

using namespace asyncckpt;
using namespace asyncckpt::cuda;

extern "C" int32_t ac_cuda_copy(int32_t device, const ac_segment* segments, uint64_t count, void* stream,
                                ac_error* error) {
  return at_cuda_border(error, [&] {
    require_sound(segments, count);
    if (count == 0) return;
    const DeviceScope scope(device);
    for (uint64_t index = 0; index < count; ++index) {
      const ac_segment& segment = segments[index];
      if (segment.bytes == 0) continue;
      AC_CUDA_ITEM(cudaMemcpyAsync(segment.target, segment.source, segment.bytes, cudaMemcpyDefault,
                                   static_cast<cudaStream_t>(stream)),
                   index);
    }
  });
}

extern "C" uint64_t ac_cuda_batch_table_bytes(uint64_t count) {
  return count * (sizeof(ac_segment) + sizeof(uint64_t)) + blocks_max * sizeof(uint64_t);
}

extern "C" int32_t ac_cuda_copy_batch(int32_t device, const ac_segment* segments, uint64_t count, void* table,
                                      void* device_table, void* stream, ac_error* error) {
  return at_cuda_border(error, [&] {
    require_sound(segments, count);
    if (count == 0) return;
    require(table != nullptr, "table is NULL");
    const uintptr_t places = reinterpret_cast<uintptr_t>(table) | reinterpret_cast<uintptr_t>(device_table);
    require(places % sizeof(uint64_t) == 0, "a table is not aligned to 8");
    const DeviceScope scope(device);
    Table filled(table, count);
    const uint64_t chunks_count = filled.fill(segments);
    if (chunks_count == 0) return;
    const unsigned blocks = choose_blocks(device, chunks_count, first_lies_on_host(segments, count));
    const uint64_t chunks_per_block = (chunks_count + blocks - 1) / blocks;
    filled.share(blocks, chunks_per_block);
    void* seen = table;
    if (device_table != nullptr) {
      const uint64_t bytes = ac_cuda_batch_table_bytes(count) - (blocks_max - blocks) * sizeof(uint64_t);
      AC_CUDA(cudaMemcpyAsync(device_table, table, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
      seen = device_table;
    }
    launch(copy_chunks, blocks, stream, Table::seen_at(seen, count, chunks_count, chunks_per_block));
  });
}
