// Facts of tensors are compared one by one; what is of another type is not looked into.
#include <vector>

#include "asyncckpt.h"
#include "check.hpp"

namespace {

struct Tensor {
  uint64_t keys = 7;
  const void* storage = this;
  int64_t sizes[2] = {2, 3};
  int64_t strides[2] = {3, 1};
  int64_t dim = 2;
  int64_t offset = 0;
  int64_t storage_bytes = 24;
  char* data = nullptr;
  int32_t dtype = 6;
  int32_t device_type = 0;
  int32_t device_index = -1;
  int32_t status = 0;
};

struct Object {
  uint64_t type = 1;
  Tensor* tensor = nullptr;
};

// A handle is where the object keeps the pointer.
const Tensor& of(const void* handle) { return **static_cast<Tensor* const*>(handle); }

template <auto Member, class Value>
int32_t number(const void* handle, Value* value) {
  *value = of(handle).*Member;
  return of(handle).status;
}

template <auto Member>
int32_t list(const void* handle, const int64_t** value) {
  *value = of(handle).*Member;
  return of(handle).status;
}

template <class Function>
const void* as_pointer(Function* function) {
  return reinterpret_cast<const void*>(function);
}

const ac_torch torch = {
    as_pointer(number<&Tensor::dim, int64_t>),
    as_pointer(list<&Tensor::sizes>),
    as_pointer(list<&Tensor::strides>),
    as_pointer(number<&Tensor::offset, int64_t>),
    as_pointer(number<&Tensor::storage_bytes, int64_t>),
    as_pointer(number<&Tensor::data, char*>),
    as_pointer(number<&Tensor::dtype, int32_t>),
    as_pointer(number<&Tensor::device_type, int32_t>),
    as_pointer(number<&Tensor::device_index, int32_t>),
    0,
    8,
    0,
    8,
};
const std::vector<int64_t> shapes = {2, 3, 3, 1};

struct State {
  explicit State(size_t count) : tensors(count), objects(count), pointers(count), places(count) {
    known.assign(count, ac_tensor{1, 7, 0, 2, 6, 0, -1});
    for (size_t index = 0; index < count; ++index) {
      tensors[index].data = reinterpret_cast<char*>(index + 1);
      objects[index].tensor = &tensors[index];
      pointers[index] = &objects[index];
    }
  }

  uint64_t alike() {
    uint64_t found = 0;
    const int32_t status = ac_tensors(&torch, pointers.data(), known.data(), pointers.size(), shapes.data(),
                                      places.data(), &found, nullptr);
    CHECK(status == AC_OK);
    return found;
  }

  std::vector<Tensor> tensors;
  std::vector<Object> objects;
  std::vector<const void*> pointers;
  std::vector<ac_tensor> known;
  std::vector<ac_tensor_place> places;
};

}  // namespace

TEST(tensors_that_are_as_known_give_their_places) {
  for (const size_t count : {0, 1, 8, 9, 40000}) {
    State state(count);
    CHECK(state.alike() == count);
    for (size_t index = 0; index < count; ++index) {
      CHECK(state.places[index].address == index + 1 && state.places[index].storage_bytes == 24);
    }
  }
}

TEST(each_fact_of_a_tensor_counts) {
  Object nothing{2, nullptr};
  for (const size_t at : {0, 600, 1999}) {
    State fresh(2000);
    for (int fact = 0; fact < 10; ++fact) {
      State state(2000);
      Tensor& changed = state.tensors[at];
      if (fact == 0) changed.keys = 8;
      if (fact == 1) changed.sizes[1] = 4;
      if (fact == 2) changed.strides[0] = 4;
      if (fact == 3) changed.dim = 1;
      if (fact == 4) changed.dtype = 5;
      if (fact == 5) changed.device_type = 1;
      if (fact == 6) changed.device_index = 0;
      if (fact == 7) changed.status = 1;
      if (fact == 8) state.pointers[at] = &nothing;
      if (fact == 9) state.objects[at].tensor = nullptr;
      CHECK(state.alike() == at);
    }
    CHECK(fresh.alike() == 2000);
  }
}

TEST(broken_contracts_of_tensors_are_refused) {
  State state(1);
  ac_torch without = torch;
  without.strides = nullptr;
  uint64_t alike = 0;
  auto call = [&](const ac_torch* functions, uint64_t* found) {
    return ac_tensors(functions, state.pointers.data(), state.known.data(), 1, shapes.data(), state.places.data(),
                      found, nullptr);
  };
  CHECK(call(&without, &alike) == AC_INVALID && call(nullptr, &alike) == AC_INVALID);
  CHECK(call(&torch, nullptr) == AC_INVALID && call(&torch, &alike) == AC_OK);
  CHECK(ac_tensors(&torch, nullptr, state.known.data(), 1, shapes.data(), state.places.data(), &alike, nullptr) ==
        AC_INVALID);
}
