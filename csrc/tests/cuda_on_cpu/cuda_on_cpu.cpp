// CUDA on the CPU: contexts, registered memory, launches, and failures on request.
#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "cuda.h"
#include "cuda_runtime.h"

namespace {

constexpr int devices_max = 16;
constexpr int multiprocessors_count = 2;
constexpr unsigned blocks_max = 0x7FFFFFFF;
constexpr unsigned threads_max = 1024;

struct World {
  std::mutex guard;
  std::map<uintptr_t, size_t> registered;  // address -> bytes
  bool contexts[devices_max] = {};
  int devices_count = 2;
  uint64_t seed = 1;
  int64_t calls_to_failure = -1;  // -1: none fails
  cudaError_t failure = cudaSuccess;
  uint64_t launches = 0, copies = 0;
  int last_device = -1;
  uintptr_t last_stream = 0;
  uint32_t last_blocks = 0;
  uintptr_t streams_made = 0;
  bool is_captured = false, is_capture_ended = false;
};

World& world() {
  static World instance;
  return instance;
}

// The device whose context is current.
thread_local int current = -1;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t keep(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// A context is a number, from 1 on.
CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<intptr_t>(device + 1)); }

CUresult get_context(CUcontext* context) {
  *context = context_of(current);
  return CUDA_SUCCESS;
}

CUresult set_context(CUcontext context) {
  current = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return CUDA_SUCCESS;
}

// What every call that works on a device begins with; under the guard.
cudaError_t enter(World& all) {
  if (all.devices_count == 0) return cudaErrorInsufficientDriver;
  if (all.is_captured && capture_mode == cudaStreamCaptureModeGlobal) all.is_capture_ended = true;
  if (current < 0) {
    current = 0;
    all.contexts[0] = true;
  }
  if (all.calls_to_failure < 0) return cudaSuccess;
  return all.calls_to_failure-- == 0 ? all.failure : cudaSuccess;
}

void remember(World& all, cudaStream_t stream, uint32_t blocks) {
  all.last_device = current;
  all.last_stream = reinterpret_cast<uintptr_t>(stream);
  all.last_blocks = blocks;
  ++(blocks > 0 ? all.launches : all.copies);
}

const struct {
  cudaError_t error;
  const char* name;
} names[] = {
    {cudaSuccess, "cudaSuccess"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver"},
    {cudaErrorNoDevice, "cudaErrorNoDevice"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered"},
    {cudaErrorNotSupported, "cudaErrorNotSupported"},
};

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
  for (const auto& known : names) {
    if (known.error == error) return known.name;
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t) { return "what CUDA says on the CPU"; }

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaGetDeviceCount(int* count) {
  const std::lock_guard lock(world().guard);
  *count = world().devices_count;
  return keep(*count == 0 ? cudaErrorInsufficientDriver : cudaSuccess);
}

cudaError_t cudaSetDevice(int device) {
  const std::lock_guard lock(world().guard);
  if (world().devices_count == 0) return keep(cudaErrorInsufficientDriver);
  if (device < 0 || device >= world().devices_count) return keep(cudaErrorInvalidDevice);
  world().contexts[device] = true;
  current = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? multiprocessors_count : 1;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long) {
  *found = nullptr;
  if (std::strcmp(name, "cuCtxGetCurrent") == 0) *found = reinterpret_cast<void*>(get_context);
  if (std::strcmp(name, "cuCtxSetCurrent") == 0) *found = reinterpret_cast<void*>(set_context);
  return *found != nullptr ? cudaSuccess : keep(cudaErrorInvalidValue);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  const std::lock_guard lock(world().guard);
  const auto place = reinterpret_cast<uintptr_t>(address);
  const auto after = world().registered.upper_bound(place);
  const bool host = after != world().registered.begin() && place - std::prev(after)->first < std::prev(after)->second;
  attributes->type = host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  const std::lock_guard lock(world().guard);
  if (const cudaError_t error = enter(world()); error != cudaSuccess) return keep(error);
  if (flags != cudaStreamNonBlocking || priority >= 0) return keep(cudaErrorInvalidValue);
  *stream = reinterpret_cast<cudaStream_t>(0x10000 + ++world().streams_made);
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned flags) {
  const std::lock_guard lock(world().guard);
  if (const cudaError_t error = enter(world()); error != cudaSuccess) return keep(error);
  if (flags != (cudaHostRegisterPortable | cudaHostRegisterMapped)) return keep(cudaErrorInvalidValue);
  const bool fresh = world().registered.emplace(reinterpret_cast<uintptr_t>(address), bytes).second;
  return keep(fresh ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void* address) {
  const std::lock_guard lock(world().guard);
  if (const cudaError_t error = enter(world()); error != cudaSuccess) return keep(error);
  const bool known = world().registered.erase(reinterpret_cast<uintptr_t>(address)) == 1;
  return keep(known ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  {
    const std::lock_guard lock(world().guard);
    if (const cudaError_t error = enter(world()); error != cudaSuccess) return keep(error);
    remember(world(), stream, 0);
  }
  std::memcpy(target, source, bytes);
  return cudaSuccess;
}

cudaError_t cuda_on_cpu_look_up(const void*) {
  const std::lock_guard lock(world().guard);
  return keep(enter(world()));
}

cudaError_t cuda_on_cpu_launch(const cudaLaunchConfig_t& config, void (*run)(const void* call), const void* call) {
  const unsigned blocks_count = config.gridDim.x, threads_count = config.blockDim.x;
  uint64_t seed = 0;
  {
    const std::lock_guard lock(world().guard);
    if (const cudaError_t error = enter(world()); error != cudaSuccess) return keep(error);
    const bool possible = blocks_count - 1 < blocks_max && threads_count - 1 < threads_max;
    if (!possible) return keep(cudaErrorInvalidConfiguration);
    remember(world(), config.stream, blocks_count);
    seed = world().seed + world().launches;
  }
  std::mt19937_64 random(seed);
  std::vector<unsigned> blocks(blocks_count);
  std::iota(blocks.begin(), blocks.end(), 0u);
  std::shuffle(blocks.begin(), blocks.end(), random);
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  for (const unsigned block : blocks) {
    const bool backwards = random() % 2 == 0;
    blockIdx = dim3(block, 0, 0);
    for (unsigned thread = 0; thread < threads_count; ++thread) {
      threadIdx = dim3(backwards ? threads_count - 1 - thread : thread, 0, 0);
      run(call);
    }
  }
  return cudaSuccess;
}

extern "C" {

void cuda_on_cpu_seed(uint64_t seed) {
  const std::lock_guard lock(world().guard);
  world().seed = seed;
}

void cuda_on_cpu_set_devices(int32_t count) {
  const std::lock_guard lock(world().guard);
  world().devices_count = std::clamp(count, 0, devices_max);
}

void cuda_on_cpu_fail_after(uint64_t calls, int32_t error) {
  const std::lock_guard lock(world().guard);
  world().calls_to_failure = error == 0 ? -1 : static_cast<int64_t>(calls);
  world().failure = static_cast<cudaError_t>(error);
}

int32_t cuda_on_cpu_current(void) { return current; }
void cuda_on_cpu_make_current(int32_t device) { current = device; }

int32_t cuda_on_cpu_capture(int32_t is_begun) {
  const std::lock_guard lock(world().guard);
  world().is_captured = is_begun != 0;
  return std::exchange(world().is_capture_ended, false);
}

int32_t cuda_on_cpu_has_context(int32_t device) {
  const std::lock_guard lock(world().guard);
  return world().contexts[device];
}

uint64_t cuda_on_cpu_launches(void) {
  const std::lock_guard lock(world().guard);
  return world().launches;
}

uint64_t cuda_on_cpu_copies(void) {
  const std::lock_guard lock(world().guard);
  return world().copies;
}

int32_t cuda_on_cpu_last_device(void) {
  const std::lock_guard lock(world().guard);
  return world().last_device;
}

uint64_t cuda_on_cpu_last_stream(void) {
  const std::lock_guard lock(world().guard);
  return world().last_stream;
}

uint32_t cuda_on_cpu_last_blocks(void) {
  const std::lock_guard lock(world().guard);
  return world().last_blocks;
}

}  // extern "C"
