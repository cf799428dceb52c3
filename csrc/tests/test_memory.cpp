// Arena memory when the system will not give or move it.
#include <cerrno>
#include <cstring>

#include "asyncckpt.h"
#include "check.hpp"
#include "faults.hpp"
#include "mapping.hpp"

using namespace asyncckpt;

TEST(failed_map_and_resize_leave_nothing_behind) {
  void* base = nullptr;
  ac_error error;
  {
    const Fault fault = Fault::failing(Call::mmap, ENOMEM);
    CHECK(ac_memory_map(1, &base, &error) == AC_NO_MEMORY);
    CHECK(error.sys_errno == ENOMEM);
  }
  CHECK(ac_memory_map(1, &base, &error) == AC_OK);
  std::memset(base, 7, huge_page_bytes);
  void* moved = nullptr;
  {
    const Fault fault = Fault::failing(Call::mremap, ENOMEM);
    CHECK(ac_memory_resize(base, huge_page_bytes, 5 * huge_page_bytes, &moved, &error) == AC_NO_MEMORY);
  }
  CHECK(static_cast<char*>(base)[huge_page_bytes - 1] == 7);
  {
    // The mapping cannot grow where it is, so it moves.
    const Fault fault = Fault::failing(Call::mremap, ENOMEM, 0, 1);
    CHECK(ac_memory_resize(base, huge_page_bytes, 5 * huge_page_bytes, &moved, &error) == AC_OK);
  }
  CHECK(moved != base && reinterpret_cast<uintptr_t>(moved) % huge_page_bytes == 0);
  CHECK(static_cast<char*>(moved)[huge_page_bytes - 1] == 7 && static_cast<char*>(moved)[huge_page_bytes] == 0);
  CHECK(ac_memory_touch(moved, 0, 5 * huge_page_bytes, 2, &error) == AC_OK);
  CHECK(static_cast<char*>(moved)[0] == 7);
  CHECK(ac_memory_unmap(moved, 5 * huge_page_bytes, &error) == AC_OK);
}

TEST(small_mappings_grow_into_big_ones) {
  Mapping mapping(100);
  CHECK(mapping.bytes() == small_page_bytes);
  std::memset(mapping.data(), 3, 100);
  for (const size_t bytes : {size_t{5000}, huge_page_bytes - 1, huge_page_bytes, 3 * huge_page_bytes + 1}) {
    mapping.grow(bytes);
    CHECK(mapping.bytes() >= bytes && mapping.data()[99] == 3 && mapping.data()[100] == 0);
    mapping.data()[bytes - 1] = 9;
    mapping.data()[bytes - 1] = 0;
  }
  Mapping other = std::move(mapping);
  CHECK(other.data()[99] == 3);
}
