/* asyncckpt: the C interface of the CUDA library, which is built and loaded separately from the core.
 *
 * It follows the rules of asyncckpt.h and uses its ac_error, ac_segment and ac_row_column. In addition:
 *
 * Device and stream: every function takes the index of a device; `stream` is a cudaStream_t of this device as a plain
 *   pointer (NULL: its legacy default stream). A call queues its work on the stream and returns; none waits for the
 *   device. The calling thread's current context, or its absence, is restored. No call disturbs the capture of a graph by
 *   another thread.
 * Memory: kernels access memory of the device, or host memory registered by ac_cuda_host_register (or by other code as
 *   portable and mapped) under the address that the host uses. It stays valid until the stream has executed the call.
 *   Addresses cannot be checked before the launch; a wrong one makes the device unusable for the process.
 *   Descriptions of the work (segments, columns, casts) are host memory and read before the call returns.
 * Errors: AC_INVALID before anything is launched; AC_DEVICE for what CUDA reports, with the number of the cudaError_t
 *   in `sys_errno`. After most of these the device is lost to this process, and every call reports the same error.
 * Threads: any may call at any time.
 * fork: a child of a process that called more than ac_cuda_abi_version and ac_cuda_error_name cannot use CUDA.
 */
#ifndef ASYNCCKPT_CUDA_H
#define ASYNCCKPT_CUDA_H

#include "asyncckpt.h"

#ifdef __cplusplus
extern "C" {
#endif

#define AC_CUDA_ABI_VERSION 2u
/* The blocks of a kernel that stores to host memory: enough for the bus, and training keeps the rest. */
#define AC_CUDA_HOST_BLOCKS 32u
#define AC_CUDA_AS_IS 0         /* a column's bytes are copied */
#define AC_CUDA_TO_BFLOAT16 1   /* float32 is rounded to bfloat16, to nearest, ties to even; NaN becomes 0x7FFF */

typedef enum ac_cuda_status {
  AC_DEVICE = 6 /* in addition to ac_status: a call of CUDA failed; sys_errno is its cudaError_t */
} ac_cuda_status;

AC_API uint32_t ac_cuda_abi_version(void);
AC_API const char* ac_cuda_error_name(int32_t number); /* of a cudaError_t: "cudaErrorIllegalAddress" */

/* How many devices there are. Always AC_OK: if CUDA offers none (no driver, one too old, no device), *count is 0 and
 * `error` says why in sys_errno and message. Starts the driver, but creates no context on a device. */
AC_API int32_t ac_cuda_devices_count(int32_t* count, ac_error* error);
/* AC_OK if this library has code for the device, else AC_DEVICE and the reason. Loads all kernels, because a launch that
 * loads them might wait for the device. */
AC_API int32_t ac_cuda_usable(int32_t device, ac_error* error);

/* ---- streams ---------------------------------------------------------------------------------------------------- */

/* A stream that nobody else has, of high priority, which does not wait for the legacy default stream. It lives as long
 * as the process. */
AC_API int32_t ac_cuda_new_stream(int32_t device, void** stream, ac_error* error);

/* Exchange how the calls of this thread are taken while other threads capture graphs: *mode becomes the mode before.
 * While it is AC_CUDA_BESIDE_CAPTURES, calls that wait or allocate do not end such a capture. Creates no context. */
AC_API int32_t ac_cuda_exchange_capture_mode(int32_t* mode, ac_error* error);
#define AC_CUDA_BESIDE_CAPTURES 2

/* ---- host memory ------------------------------------------------------------------------------------------------ */

/* Pin host memory and map it for all devices (portable and mapped), at the same address. Slow, and may wait for the
 * device. `address` begins a page. Registered memory must be neither unmapped nor moved. */
AC_API int32_t ac_cuda_host_register(int32_t device, void* address, uint64_t bytes, ac_error* error);
AC_API int32_t ac_cuda_host_unregister(int32_t device, void* address, ac_error* error);

/* ---- copies ----------------------------------------------------------------------------------------------------- */

/* One cudaMemcpyAsync per segment, in any direction: for large segments. Waits for host memory that is not registered.
 * `error->item` is the index of the segment that failed; those before it are queued. */
AC_API int32_t ac_cuda_copy(int32_t device, const ac_segment* segments, uint64_t count, void* stream, ac_error* error);

AC_API uint64_t ac_cuda_batch_table_bytes(uint64_t count);
/* Copy all segments in one launch: for many small ones, of any size and alignment. Targets must not overlap each other
 * or any source. `table` is registered host memory of ac_cuda_batch_table_bytes(count) bytes, aligned to 8, which this
 * call fills; the kernel reads it there, or from `device_table`, device memory of as many bytes, if that is not NULL:
 * the table is copied there first, on the stream, which saves the kernel a read over the bus for every segment. Both
 * belong to the call until the stream has executed it. The first target that is not empty decides whether targets are
 * on the host. */
AC_API int32_t ac_cuda_copy_batch(int32_t device, const ac_segment* segments, uint64_t count, void* table,
                                  void* device_table, void* stream, ac_error* error);

/* ---- rows: columns of a table by row index ---------------------------------------------------------------------- */

/* Like ac_copy_rows. The arrays of row numbers are memory that kernels can access (best of the device), aligned to 8,
 * and are not checked: pairs with a negative row are skipped. casts: one of AC_CUDA_AS_IS and
 * AC_CUDA_TO_BFLOAT16 for every column, in host memory; NULL: all as they are. The row_bytes of a column that is cast
 * are those of its source, a multiple of 4; its source is aligned to 4, its target to 2. */
AC_API int32_t ac_cuda_copy_rows(int32_t device, const ac_row_column* columns, const uint8_t* casts,
                                 uint64_t columns_count, const int64_t* source_rows, const int64_t* target_rows,
                                 uint64_t count, void* stream, ac_error* error);

/* Copy row r of every column to row r of its target wherever marks[r] is greater than `above`, for r below rows_count.
 * marks is memory of the device; casts as above. */
AC_API int32_t ac_cuda_copy_marked_rows(int32_t device, const ac_row_column* columns, const uint8_t* casts,
                                        uint64_t columns_count, const uint8_t* marks, uint8_t above,
                                        uint64_t rows_count, void* stream, ac_error* error);

/* The fingerprints of ac_fingerprint, bit for bit, to memory that kernels can access, aligned to 8. */
AC_API int32_t ac_cuda_fingerprint(int32_t device, const ac_row_column* columns, uint64_t columns_count,
                                   uint64_t rows_count, uint64_t* fingerprints, void* stream, ac_error* error);

#ifdef __cplusplus
}
#endif
#endif
