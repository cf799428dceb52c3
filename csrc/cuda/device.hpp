// How this library calls CUDA: every call through one macro, on the device that is asked for, one way to launch.
//
// The sources of this folder are also compiled for the CPU, where tests/cuda_on_cpu stands in for cuda_runtime.h. So
// kernels use neither shared memory nor talk among threads, and are launched by launch().
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../src/error.hpp"
#include "asyncckpt_cuda.h"

namespace asyncckpt::cuda {

// Threads of every block.
constexpr unsigned block_threads = 256;

// A call of CUDA that failed; Error is for everything else.
struct DeviceError {
  ac_error record;
};

// Raise DeviceError unless `result` is a success. `call` is the text of the call, `item` what it was made for.
void check(cudaError_t result, const char* call, uint64_t item);
#define AC_CUDA_ITEM(call, item) ::asyncckpt::cuda::check((call), #call, (item))
#define AC_CUDA(call) AC_CUDA_ITEM(call, 0)

// at_border of error.hpp, for bodies that call CUDA.
template <class Body>
int32_t at_cuda_border(ac_error* error, Body&& body) noexcept {
  try {
    body();
    if (error != nullptr) *error = ac_error{};
    return AC_OK;
  } catch (const DeviceError& failure) {
    if (error != nullptr) *error = failure.record;
    return AC_DEVICE;
  } catch (...) {
    return report_current(error);
  }
}

// Makes a device current while it lives, then the context that was current before, or none. Meanwhile no call of this
// thread ends the capture of a graph by another one.
//
// Contexts, not device numbers, because setting a device creates its context: a thread that never chose a device has
// number 0, and setting this back would cost every rank of a machine some hundred MiB on its first device.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  CUcontext before_ = nullptr;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Whether memory is the host's, and is reached over the bus.
bool lies_on_host(const void* address);

// How many blocks to launch for work that `tiles` blocks would do at most, each taking one tile after the other. The
// device is current. No more than blocks_max.
constexpr unsigned blocks_max = 4096;
unsigned choose_blocks(int32_t device, uint64_t tiles, bool stores_to_host);

template <class... Parameters>
void launch(void (*kernel)(Parameters...), unsigned blocks, void* stream, const Parameters&... parameters) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(block_threads);
  config.stream = static_cast<cudaStream_t>(stream);
  AC_CUDA(cudaLaunchKernelEx(&config, kernel, parameters...));
}

template <class... Parameters>
void load(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes;
  AC_CUDA(cudaFuncGetAttributes(&attributes, kernel));
}

// Load the kernels of the file of this name.
void load_copy();
void load_copy_rows();
void load_fingerprint();

}  // namespace asyncckpt::cuda
