// Devices, contexts, launches, and host memory that devices reach.
#include "device.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace asyncckpt::cuda {
namespace {

// Blocks for each multiprocessor: as many threads as it can hold at once.
constexpr unsigned blocks_per_multiprocessor = 2048 / block_threads;
// Since this version of the driver its functions are what is called here.
constexpr unsigned driver_version = 11030;
// Clamped to what the device has: kernels of side streams run before those of training, which waits for them.
constexpr int high_priority = -1;

[[noreturn]] __attribute__((format(printf, 3, 4))) void fail(cudaError_t result, uint64_t item, const char* format,
                                                             ...) {
  DeviceError failure{{AC_DEVICE, static_cast<int32_t>(result), item, {}}};
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(failure.record.message, sizeof failure.record.message, format, arguments);
  va_end(arguments);
  throw failure;
}

template <class Function>
Function* driver_function(const char* name) {
  void* found = nullptr;
#if CUDART_VERSION >= 12050
  AC_CUDA(cudaGetDriverEntryPointByVersion(name, &found, driver_version, cudaEnableDefault));
#else
  AC_CUDA(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault));
#endif
  if (found == nullptr) fail(cudaErrorInsufficientDriver, 0, "the CUDA driver has no %s", name);
  return reinterpret_cast<Function*>(found);
}

// The library does not link the driver, so it asks the runtime for it, once.
struct Driver {
  Driver() {
    // Where there is no driver, this says why; the constructor is then run again by the next call.
    int count = 0;
    AC_CUDA(cudaGetDeviceCount(&count));
    get_context = driver_function<CUresult(CUcontext*)>("cuCtxGetCurrent");
    set_context = driver_function<CUresult(CUcontext)>("cuCtxSetCurrent");
  }
  CUresult (*get_context)(CUcontext*) = nullptr;
  CUresult (*set_context)(CUcontext) = nullptr;
};

const Driver& driver() {
  static const Driver instance;
  return instance;
}

}  // namespace

void check(cudaError_t result, const char* call, uint64_t item) {
  if (result == cudaSuccess) return;
  // What is reported here shall not be reported again by a later call of somebody else.
  (void)cudaGetLastError();
  fail(result, item, "%.*s: %s (%s)", static_cast<int>(std::strcspn(call, "(")), call, cudaGetErrorString(result),
       cudaGetErrorName(result));
}

DeviceScope::DeviceScope(int32_t device) {
  require(device >= 0, "the number of a device is negative");
  if (driver().get_context(&before_) != CUDA_SUCCESS) before_ = nullptr;
  AC_CUDA(cudaSetDevice(device));
  AC_CUDA(cudaThreadExchangeStreamCaptureMode(&mode_));
}

DeviceScope::~DeviceScope() {
  (void)cudaThreadExchangeStreamCaptureMode(&mode_);
  (void)driver().set_context(before_);
}

bool lies_on_host(const void* address) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
    // Nothing but the size of a launch hangs on the answer.
    (void)cudaGetLastError();
    return false;
  }
  return attributes.type == cudaMemoryTypeHost || attributes.type == cudaMemoryTypeUnregistered;
}

unsigned choose_blocks(int32_t device, uint64_t tiles, bool stores_to_host) {
  uint64_t blocks = AC_CUDA_HOST_BLOCKS;
  if (!stores_to_host) {
    int multiprocessors = 0;
    AC_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    blocks = std::min<uint64_t>(static_cast<unsigned>(multiprocessors) * blocks_per_multiprocessor, blocks_max);
  }
  return static_cast<unsigned>(std::max<uint64_t>(1, std::min(blocks, tiles)));
}

}  // namespace asyncckpt::cuda

using namespace asyncckpt;
using namespace asyncckpt::cuda;

extern "C" uint32_t ac_cuda_abi_version(void) { return AC_CUDA_ABI_VERSION; }

extern "C" const char* ac_cuda_error_name(int32_t number) { return cudaGetErrorName(static_cast<cudaError_t>(number)); }

extern "C" int32_t ac_cuda_devices_count(int32_t* count, ac_error* error) {
  int found = 0;
  const int32_t status = at_cuda_border(error, [&] { AC_CUDA(cudaGetDeviceCount(&found)); });
  *count = status == AC_OK ? found : 0;
  if (error != nullptr) error->status = AC_OK;
  return AC_OK;
}

extern "C" int32_t ac_cuda_usable(int32_t device, ac_error* error) {
  return at_cuda_border(error, [&] {
    const DeviceScope scope(device);
    load_copy();
    load_copy_rows();
    load_fingerprint();
  });
}

extern "C" int32_t ac_cuda_new_stream(int32_t device, void** stream, ac_error* error) {
  return at_cuda_border(error, [&] {
    require(stream != nullptr, "stream is NULL");
    const DeviceScope scope(device);
    cudaStream_t made = nullptr;
    AC_CUDA(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, high_priority));
    *stream = made;
  });
}

extern "C" int32_t ac_cuda_exchange_capture_mode(int32_t* mode, ac_error* error) {
  return at_cuda_border(error, [&] {
    require(mode != nullptr, "mode is NULL");
    require(*mode >= 0 && *mode <= AC_CUDA_BESIDE_CAPTURES, "there is no such mode of captures");
    static_assert(AC_CUDA_BESIDE_CAPTURES == cudaStreamCaptureModeRelaxed);
    auto exchanged = static_cast<cudaStreamCaptureMode>(*mode);
    AC_CUDA(cudaThreadExchangeStreamCaptureMode(&exchanged));
    *mode = exchanged;
  });
}

extern "C" int32_t ac_cuda_host_register(int32_t device, void* address, uint64_t bytes, ac_error* error) {
  return at_cuda_border(error, [&] {
    require(bytes == 0 || address != nullptr, "address is NULL");
    require(reinterpret_cast<uintptr_t>(address) % AC_PAGE_BYTES == 0, "address does not begin a page");
    if (bytes == 0) return;
    const DeviceScope scope(device);
    int same_address = 0;
    AC_CUDA(cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, device));
    if (same_address == 0) {
      fail(cudaErrorNotSupported, 0, "device %d cannot reach registered host memory under the host's address", device);
    }
    AC_CUDA(cudaHostRegister(address, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
  });
}

extern "C" int32_t ac_cuda_host_unregister(int32_t device, void* address, ac_error* error) {
  return at_cuda_border(error, [&] {
    require(address != nullptr, "address is NULL");
    const DeviceScope scope(device);
    AC_CUDA(cudaHostUnregister(address));
  });
}
