// Compiled once to see whether a CUDA compiler knows what this library needs: the architectures, parameters that stay
// where they are, launches that return their error.
#include <cuda.h>
#include <cuda_runtime.h>

struct Pair {
  long long first, second;
};

__global__ void add(const __grid_constant__ Pair pair, long long* sum) { *sum = pair.first + pair.second; }

int main() {
  cudaLaunchConfig_t config{};
  config.gridDim = config.blockDim = dim3(1);
  return cudaLaunchKernelEx(&config, add, Pair{1, 2}, static_cast<long long*>(nullptr)) == cudaSuccess ? 0 : 1;
}
