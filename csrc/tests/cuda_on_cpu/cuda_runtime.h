// Stands in for CUDA's own header, so that the sources of csrc/cuda run on the CPU, where sanitizers watch them.
//
// Memory of devices is plain memory. A stream runs what it is given at once. A launch runs its blocks in a random
// order, and the threads of each forwards or backwards; it knows neither shared memory nor talk among threads. Only
// what the sources use is here, with CUDA's names, types and numbers. cuda_on_cpu.h has what tests ask and arrange.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_on_cpu.h"

#define CUDART_VERSION 13000

#define __host__
#define __device__
#define __global__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)

enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorIllegalAddress = 700,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713,
  cudaErrorNotSupported = 801,
};
typedef cudaError cudaError_t;
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum cudaMemoryType { cudaMemoryTypeUnregistered = 0, cudaMemoryTypeHost = 1, cudaMemoryTypeDevice = 2 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrCanUseHostPointerForRegisteredMem = 91 };
enum { cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };
enum { cudaEnableDefault = 0 };
enum { cudaStreamNonBlocking = 1 };
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};
typedef struct CUstream_st* cudaStream_t;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct cudaPointerAttributes {
  cudaMemoryType type;
};
struct cudaFuncAttributes {};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
inline uint64_t __umul64hi(uint64_t left, uint64_t right) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(left) * right >> 64);
}
template <class Value>
Value __ldcs(const Value* address) {
  return *address;
}
template <class Value>
void __stcs(Value* address, Value value) {
  *address = value;
}

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned version,
                                             unsigned long long flags);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* address);
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
// The two below without their templates.
cudaError_t cuda_on_cpu_look_up(const void* kernel);
cudaError_t cuda_on_cpu_launch(const cudaLaunchConfig_t& config, void (*run)(const void* call), const void* call);

template <class... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*kernel)(Parameters...)) {
  return cuda_on_cpu_look_up(reinterpret_cast<const void*>(kernel));
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  const auto call = [&] { kernel(arguments...); };
  using Call = decltype(call);
  return cuda_on_cpu_launch(*config, [](const void* known) { (*static_cast<Call*>(known))(); }, &call);
}
