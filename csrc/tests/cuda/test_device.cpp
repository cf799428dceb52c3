// Devices, contexts, registered memory, and what is said when CUDA fails.
#include <cstdlib>
#include <cstring>

#include "asyncckpt_cuda.h"
#include "check.hpp"
#include "cuda_on_cpu.h"
#include "device.hpp"

using namespace asyncckpt::cuda;

namespace {

// Every call that works on a device.
std::vector<int32_t> call_all(int32_t device, ac_error* error) {
  static char source[64], target[64];
  alignas(8) static char table[4096 * 10];
  static uint64_t print;
  static uint8_t mark = 1;
  void* stream = reinterpret_cast<void*>(0x50);
  const ac_segment segment{source, target, 64};
  const ac_row_column column{source, target, 64};
  return {
      ac_cuda_copy(device, &segment, 1, stream, error),
      ac_cuda_copy_batch(device, &segment, 1, table, nullptr, stream, error),
      ac_cuda_copy_rows(device, &column, nullptr, 1, nullptr, nullptr, 1, stream, error),
      ac_cuda_copy_marked_rows(device, &column, nullptr, 1, &mark, 0, 1, stream, error),
      ac_cuda_fingerprint(device, &column, 1, 1, &print, stream, error),
  };
}

}  // namespace

TEST(a_thread_without_a_context_has_none_afterwards) {
  cuda_on_cpu_set_devices(3);
  cuda_on_cpu_make_current(-1);
  for (const int32_t status : call_all(2, nullptr)) CHECK(status == AC_OK);
  CHECK(ac_cuda_usable(2, nullptr) == AC_OK);
  CHECK(cuda_on_cpu_current() == -1 && cuda_on_cpu_last_device() == 2);
  CHECK(cuda_on_cpu_has_context(2) == 1);
  cuda_on_cpu_set_devices(2);
}

TEST(the_context_that_was_current_is_current_again) {
  for (const int32_t before : {0, 1}) {
    cuda_on_cpu_make_current(before);
    for (const int32_t status : call_all(1, nullptr)) CHECK(status == AC_OK);
    CHECK(cuda_on_cpu_current() == before && cuda_on_cpu_last_device() == 1 && cuda_on_cpu_last_stream() == 0x50);
    cuda_on_cpu_fail_after(0, 700);
    CHECK(call_all(1, nullptr)[0] == AC_DEVICE);
    CHECK(cuda_on_cpu_current() == before);
  }
}

TEST(no_call_ends_the_capture_of_another_thread) {
  void* stream = nullptr;
  alignas(4096) static char page[4096];
  cuda_on_cpu_capture(1);
  for (const int32_t status : call_all(1, nullptr)) CHECK(status == AC_OK);
  CHECK(ac_cuda_usable(1, nullptr) == AC_OK && ac_cuda_new_stream(1, &stream, nullptr) == AC_OK);
  CHECK(ac_cuda_host_register(0, page, sizeof page, nullptr) == AC_OK);
  CHECK(ac_cuda_host_unregister(0, page, nullptr) == AC_OK);
  CHECK(cuda_on_cpu_capture(0) == 0);
}

TEST(a_thread_goes_beside_captures_from_one_exchange_to_the_next) {
  int32_t mode = AC_CUDA_BESIDE_CAPTURES;
  CHECK(ac_cuda_exchange_capture_mode(&mode, nullptr) == AC_OK && mode == 0);
  for (const int32_t status : call_all(1, nullptr)) CHECK(status == AC_OK);
  CHECK(ac_cuda_exchange_capture_mode(&mode, nullptr) == AC_OK && mode == AC_CUDA_BESIDE_CAPTURES);
  for (const int32_t wrong : {-1, 3}) {
    mode = wrong;
    CHECK(ac_cuda_exchange_capture_mode(&mode, nullptr) == AC_INVALID && mode == wrong);
  }
  CHECK(ac_cuda_exchange_capture_mode(nullptr, nullptr) == AC_INVALID);
}

TEST(every_stream_is_another_one) {
  void *first = nullptr, *second = nullptr;
  CHECK(ac_cuda_new_stream(0, &first, nullptr) == AC_OK && ac_cuda_new_stream(0, &second, nullptr) == AC_OK);
  CHECK(first != nullptr && second != nullptr && first != second);
  CHECK(ac_cuda_new_stream(0, nullptr, nullptr) == AC_INVALID);
}

TEST(every_failure_of_cuda_is_reported_once) {
  for (uint64_t calls = 0; calls < 5; ++calls) {
    ac_error error;
    cuda_on_cpu_fail_after(calls, 700);
    const std::vector<int32_t> statuses = call_all(0, &error);
    for (uint64_t index = 0; index < statuses.size(); ++index) {
      CHECK(statuses[index] == (index == calls ? static_cast<int32_t>(AC_DEVICE) : static_cast<int32_t>(AC_OK)));
    }
    CHECK(cudaGetLastError() == cudaSuccess);
  }
}

TEST(a_device_without_code_for_it_is_told) {
  for (uint64_t calls = 0; calls < 3; ++calls) {
    ac_error error;
    cuda_on_cpu_fail_after(calls, 209);
    CHECK(ac_cuda_usable(0, &error) == AC_DEVICE && error.sys_errno == 209);
    CHECK(std::strstr(error.message, "cudaErrorNoKernelImageForDevice") != nullptr);
  }
  CHECK(ac_cuda_usable(0, nullptr) == AC_OK);
  CHECK(ac_cuda_usable(2, nullptr) == AC_DEVICE);
  CHECK(ac_cuda_usable(-1, nullptr) == AC_INVALID);
}

TEST(no_driver_is_no_device_and_a_reason) {
  int32_t count = 7;
  ac_error error;
  cuda_on_cpu_set_devices(0);
  CHECK(ac_cuda_devices_count(&count, &error) == AC_OK && count == 0 && error.status == AC_OK);
  CHECK(error.sys_errno == 35 && std::strstr(error.message, "cudaErrorInsufficientDriver") != nullptr);
  CHECK(ac_cuda_devices_count(&count, nullptr) == AC_OK && count == 0);
  for (const int32_t status : call_all(0, &error)) CHECK(status == AC_DEVICE);
  cuda_on_cpu_set_devices(2);
  CHECK(ac_cuda_devices_count(&count, &error) == AC_OK && count == 2 && error.message[0] == '\0');
}

TEST(launches_are_bounded) {
  CHECK(choose_blocks(0, 1, false) == 1);
  CHECK(choose_blocks(0, 5, false) == 5);
  CHECK(choose_blocks(0, uint64_t{1} << 60, false) == 16);
  CHECK(choose_blocks(0, uint64_t{1} << 60, true) == AC_CUDA_HOST_BLOCKS);
  CHECK(choose_blocks(0, 3, true) == 3);
}

TEST(registered_memory_lies_on_the_host) {
  void* page = nullptr;
  CHECK(posix_memalign(&page, AC_PAGE_BYTES, 2 * AC_PAGE_BYTES) == 0);
  char* first = static_cast<char*>(page);
  ac_error error;
  CHECK(ac_cuda_host_register(0, first + 1, 10, &error) == AC_INVALID);
  CHECK(ac_cuda_host_register(0, nullptr, 10, &error) == AC_INVALID);
  CHECK(!lies_on_host(first));
  CHECK(ac_cuda_host_register(1, first, AC_PAGE_BYTES + 10, nullptr) == AC_OK);
  CHECK(lies_on_host(first) && lies_on_host(first + AC_PAGE_BYTES + 9) && !lies_on_host(first + AC_PAGE_BYTES + 10));
  CHECK(ac_cuda_host_register(0, first, AC_PAGE_BYTES, &error) == AC_DEVICE && error.sys_errno == 712);
  CHECK(ac_cuda_host_unregister(0, first, nullptr) == AC_OK && !lies_on_host(first));
  CHECK(ac_cuda_host_unregister(0, first, &error) == AC_DEVICE && error.sys_errno == 713);
  CHECK(ac_cuda_host_unregister(0, nullptr, &error) == AC_INVALID);
  std::free(page);
}
