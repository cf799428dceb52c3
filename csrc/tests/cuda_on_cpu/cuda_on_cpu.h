/* What tests ask of CUDA on the CPU, and what they arrange, for all threads. Contexts belong to a thread. */
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_ON_CPU_API __attribute__((visibility("default")))

/* The order of blocks and threads in launches from now on. */
CUDA_ON_CPU_API void cuda_on_cpu_seed(uint64_t seed);
/* How many devices there are, 2 at first; each has 2 multiprocessors. 0: there is no driver. */
CUDA_ON_CPU_API void cuda_on_cpu_set_devices(int32_t count);
/* The call of CUDA that comes after `calls` others fails with this cudaError_t and does nothing. Counted are calls that
 * work on a device: copies, launches, look-ups of kernels, registrations. */
CUDA_ON_CPU_API void cuda_on_cpu_fail_after(uint64_t calls, int32_t error);

/* The device whose context is current in this thread, -1 for none; and to make it so. */
CUDA_ON_CPU_API int32_t cuda_on_cpu_current(void);
CUDA_ON_CPU_API void cuda_on_cpu_make_current(int32_t device);
/* Whether anybody made a context on a device. */
CUDA_ON_CPU_API int32_t cuda_on_cpu_has_context(int32_t device);

/* Let another thread capture a graph until this is called with 0: calls of a thread that does not go beside captures end
 * it. Returns whether the last capture was ended so. */
CUDA_ON_CPU_API int32_t cuda_on_cpu_capture(int32_t is_begun);

/* Launches and copies since the start, and of the last one: device, stream, blocks (0: it was a copy). */
CUDA_ON_CPU_API uint64_t cuda_on_cpu_launches(void);
CUDA_ON_CPU_API uint64_t cuda_on_cpu_copies(void);
CUDA_ON_CPU_API int32_t cuda_on_cpu_last_device(void);
CUDA_ON_CPU_API uint64_t cuda_on_cpu_last_stream(void);
CUDA_ON_CPU_API uint32_t cuda_on_cpu_last_blocks(void);

#ifdef __cplusplus
}
#endif
#endif
