// Tensors of torch, read through its stable C interface: some calls for each.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "asyncckpt.h"
#include "error.hpp"
#include "prefetch.hpp"

namespace asyncckpt {
namespace {

constexpr uint64_t ahead = 8;  // how many tensors before its turn the storage of one is asked for; the tensor, twice
constexpr uint64_t line_bytes = 64;
constexpr uint64_t tensor_lines = 4;
constexpr uint64_t storage_lines = 2;

template <class Value>
using Getter = int32_t (*)(const void* tensor, Value* value);

class Torch {
 public:
  explicit Torch(const ac_torch& found) : found_(found) {
    for (const void* function : {found.dim, found.sizes, found.strides, found.storage_offset, found.storage_size,
                                 found.data_ptr, found.dtype, found.device_type, found.device_index}) {
      require(function != nullptr, "a function of torch is NULL");
    }
  }

  uint64_t type(const void* object) const { return word(object, found_.type_offset); }
  // In the object lies what torch's functions take: a pointer to the tensor itself.
  const void* handle(const void* object) const { return static_cast<const char*>(object) + found_.tensor_offset; }

  void prefetch_tensor(const void* object) const {
    prefetch_lines(word(object, found_.tensor_offset), tensor_lines);
  }

  void prefetch_storage(const void* object) const {
    const uint64_t tensor = word(object, found_.tensor_offset);
    if (tensor == 0 || found_.memory_offset == 0) return;
    prefetch_lines(word(reinterpret_cast<const void*>(tensor), found_.memory_offset), storage_lines);
  }

  // Whether a tensor of the known type is as known; then `place` is where it is.
  bool read(const void* object, const ac_tensor& known, const int64_t* shapes, ac_tensor_place& place) const {
    const void* tensor = handle(object);
    const uint64_t at = word(object, found_.tensor_offset);
    if (at == 0 || word(reinterpret_cast<const void*>(at), found_.keys_offset) != known.keys) return false;
    if (!is(found_.dim, tensor, static_cast<int64_t>(known.dim)) || !is(found_.dtype, tensor, known.dtype)) return false;
    if (!is(found_.device_type, tensor, known.device_type)) return false;
    if (!is(found_.device_index, tensor, known.device_index)) return false;
    const int64_t* shape = shapes + known.shape;
    if (!has(found_.sizes, tensor, shape, known.dim)) return false;
    if (!has(found_.strides, tensor, shape + known.dim, known.dim)) return false;
    void* address = nullptr;
    if (!get(found_.data_ptr, tensor, address) || !get(found_.storage_offset, tensor, place.offset)) return false;
    place.address = reinterpret_cast<uint64_t>(address);
    return get(found_.storage_size, tensor, place.storage_bytes);
  }

 private:
  static void prefetch_lines(uint64_t begin, uint64_t count) {
    for (uint64_t line = 0; line < count; ++line) {
      prefetch_to_read(reinterpret_cast<const char*>(begin) + line * line_bytes);
    }
  }

  static uint64_t word(const void* base, uint64_t offset) {
    uint64_t value;
    std::memcpy(&value, static_cast<const char*>(base) + offset, sizeof value);
    return value;
  }

  template <class Value>
  static bool get(const void* function, const void* tensor, Value& value) {
    return reinterpret_cast<Getter<Value>>(const_cast<void*>(function))(tensor, &value) == 0;
  }

  template <class Value>
  static bool is(const void* function, const void* tensor, Value known) {
    Value found{};
    return get(function, tensor, found) && found == known;
  }

  static bool has(const void* function, const void* tensor, const int64_t* known, int32_t dim) {
    const int64_t* found = nullptr;
    return get(function, tensor, found) && std::equal(known, known + dim, found);
  }

  const ac_torch& found_;
};

// How many come before the first one that is not as known.
uint64_t read_tensors(const Torch& torch, const void* const* objects, const ac_tensor* known, uint64_t count,
                      const int64_t* shapes, ac_tensor_place* places) {
  // First of all of them: what is of another type may have no tensor where the others have theirs.
  uint64_t typed = 0;
  while (typed < count && torch.type(objects[typed]) == known[typed].type) ++typed;
  for (uint64_t index = 0; index < typed; ++index) {
    if (index + 2 * ahead < typed) torch.prefetch_tensor(objects[index + 2 * ahead]);
    if (index + ahead < typed) torch.prefetch_storage(objects[index + ahead]);
    if (!torch.read(objects[index], known[index], shapes, places[index])) return index;
  }
  return typed;
}

}  // namespace
}  // namespace asyncckpt

extern "C" int32_t ac_tensors(const ac_torch* torch, const void* const* objects, const ac_tensor* known,
                              uint64_t count, const int64_t* shapes, ac_tensor_place* places, uint64_t* alike,
                              ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    require(torch != nullptr && alike != nullptr, "torch or alike is NULL");
    require(count == 0 || (objects != nullptr && known != nullptr && shapes != nullptr && places != nullptr),
            "objects, known, shapes or places is NULL");
    *alike = read_tensors(Torch(*torch), objects, known, count, shapes, places);
  });
}
