/* asyncckpt: the C interface of the compiled core.
 *
 * Plain functions over pointers, sizes and file descriptors. No Python, no torch, no exceptions across this interface.
 * Every function that can fail returns an ac_status and fills `error` (which may be NULL) when the status is not AC_OK.
 *
 * Ownership: the caller owns every pointer and every file descriptor it passes; a call keeps none of them after it
 *   returns. Objects made by an `ac_*_new` function are freed by the matching `ac_*_free`.
 * Threads: functions on different objects may run at once. One ac_idmap or ac_digester is used by one thread at a time.
 * Cancel: `cancel` points to an int32 that another thread may set to non-zero; the call then ends soon with AC_CANCELLED.
 * Progress: `bytes_done` points to a uint64 that the call adds to as bytes reach the disk (or memory); either may be NULL.
 */
#ifndef ASYNCCKPT_H
#define ASYNCCKPT_H

#include <stdint.h>

#if defined(__GNUC__)
#define AC_API __attribute__((visibility("default")))
#else
#define AC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define AC_ABI_VERSION 11u
#define AC_PAGE_BYTES 4096u            /* alignment of O_DIRECT addresses, offsets and lengths */
#define AC_LEAF_BYTES (4u << 20)       /* a digest is taken over leaves of this size */
#define AC_DIGEST_BYTES 16u

typedef enum ac_status {
  AC_OK = 0,
  AC_INVALID = 1,   /* an argument breaks the contract below */
  AC_SYSTEM = 2,    /* a system call failed; sys_errno says how */
  AC_NO_MEMORY = 3,
  AC_CANCELLED = 4,
  AC_SHORT = 5      /* a file ended before the requested bytes */
} ac_status;

typedef struct ac_error {
  int32_t status;
  int32_t sys_errno;   /* 0 when no system call failed */
  uint64_t item;       /* index of the segment, file, span or read that failed */
  char message[240];   /* what failed, ended by NUL */
} ac_error;

AC_API uint32_t ac_abi_version(void);
AC_API const char* ac_cpu_variant(void); /* "avx512", "avx2" or "portable": which copy and digest kernels run */
AC_API uint32_t ac_cores_count(void);    /* cores this process may use (affinity mask) */

/* ---- copy: the snapshot kernel ---------------------------------------------------------------------------------- */

typedef struct ac_segment {
  const void* source;
  void* target;
  uint64_t bytes;
} ac_segment;

/* Copy all segments, in parallel on `threads` threads (0 = all cores; the caller is one of them). Targets must not
 * overlap each other or any source. Stores are non-temporal and page-interleaved if that is faster. */
AC_API int32_t ac_copy(const ac_segment* segments, uint64_t count, uint32_t threads, ac_error* error);

/* ---- memory: staging arenas ------------------------------------------------------------------------------------- */

/* Map `bytes` (rounded up to 2 MiB) of anonymous memory: huge pages advised, not inherited by forked children, not yet
 * touched. */
AC_API int32_t ac_memory_map(uint64_t bytes, void** base, ac_error* error);
/* Grow or shrink a mapping; touched pages keep their content and are not copied. */
AC_API int32_t ac_memory_resize(void* base, uint64_t old_bytes, uint64_t new_bytes, void** new_base, ac_error* error);
/* Fault in [begin, end) on `threads` threads (0 = all cores), so that later stores find their pages. */
AC_API int32_t ac_memory_touch(void* base, uint64_t begin, uint64_t end, uint32_t threads, ac_error* error);
AC_API int32_t ac_memory_unmap(void* base, uint64_t bytes, ac_error* error);
/* Request huge pages for memory of any origin that was not touched yet; the system may refuse. */
AC_API void ac_memory_advise_huge(void* data, uint64_t bytes);

/* ---- digest ------------------------------------------------------------------------------------------------------
 * The digest of n bytes: XXH3-128 (canonical, big-endian, seed 0) of each leaf of AC_LEAF_BYTES (the last one shorter;
 * no leaf when n = 0), and XXH3-128 of the concatenation of those 16-byte digests. */

typedef struct ac_span {
  const void* data;
  uint64_t bytes;
} ac_span;

/* digests: count * 16 bytes. leaves: NULL, or 16 bytes for each leaf of each span, one after the other. */
AC_API int32_t ac_digest(const ac_span* spans, uint64_t count, uint8_t* digests, uint8_t* leaves, uint32_t threads,
                         ac_error* error);

typedef struct ac_digester ac_digester;
AC_API ac_digester* ac_digester_new(void); /* NULL: no memory */
AC_API int32_t ac_digester_update(ac_digester* digester, const void* data, uint64_t bytes, ac_error* error);
/* Write the digest, and start again. leaves: as above, of what has come. */
AC_API void ac_digester_end(ac_digester* digester, uint8_t* digest, uint8_t* leaves);
AC_API void ac_digester_free(ac_digester* digester);

/* ---- drain: arena -> files -------------------------------------------------------------------------------------- */

/* The file consists of its extents, one after another. A write call never crosses the end of an extent. */
typedef struct ac_file {
  const ac_span* extents;  /* direct: every extent begins on a page and all but the last one are whole pages; the last one
                              is readable up to its bytes rounded up to AC_PAGE_BYTES */
  uint64_t extents_count;
  int32_t fd;              /* open for writing, empty */
  int32_t direct;          /* non-zero: fd was opened with O_DIRECT */
} ac_file;

typedef struct ac_drain_options {
  uint64_t block_bytes;     /* bytes of one write call; 0 = 16 MiB */
  uint32_t writers;         /* files written at once; 0 = 1 */
  uint32_t digest_threads;  /* threads that compute digests beside the writers; 0 = 1 */
  uint32_t background;      /* 0: normal priority; 1: digest threads run SCHED_BATCH with nice 5; 2: SCHED_IDLE */
  uint32_t sync;            /* non-zero: fsync each file after its last byte */
} ac_drain_options;

/* Write every file (reserve its space, write, truncate to its length, fsync) and compute the digest of every span, at
 * the same time; leaves: as of ac_digest. A direct write that the file system refuses with EINVAL continues without
 * O_DIRECT. A failed fsync is not retried. */
AC_API int32_t ac_drain(const ac_file* files, uint64_t files_count, const ac_span* spans, uint64_t spans_count,
                        uint8_t* digests, uint8_t* leaves, const ac_drain_options* options, uint64_t* bytes_done,
                        const int32_t* cancel, ac_error* error);

/* Write bytes at an offset (short writes and EINTR handled). direct: data, bytes and offset are multiples of
 * AC_PAGE_BYTES; EINVAL falls back as above. */
AC_API int32_t ac_write(int32_t fd, const void* data, uint64_t bytes, uint64_t offset, int32_t direct, ac_error* error);

/* ---- read: files -> memory -------------------------------------------------------------------------------------- */

typedef struct ac_read_item {
  void* target;      /* any alignment */
  uint64_t offset;   /* in the file, any alignment */
  uint64_t bytes;
  int32_t fd;
  int32_t direct;    /* non-zero: fd was opened with O_DIRECT */
} ac_read_item;

typedef struct ac_read_options {
  uint64_t block_bytes;  /* bytes of one read call; 0 = 4 MiB */
  uint32_t threads;      /* 0 = 4 */
} ac_read_options;

/* Read every item into its target and compute the digests (count * 16 bytes, may be NULL) of the bytes that were read.
 * Neighbouring small items of one file are read together. AC_SHORT if a file ends too early. */
AC_API int32_t ac_read(const ac_read_item* items, uint64_t count, uint8_t* digests, const ac_read_options* options,
                       uint64_t* bytes_done, const int32_t* cancel, ac_error* error);

/* ---- rows: columns of a table by row index ----------------------------------------------------------------------
 * A column is a sequence of rows of row_bytes (0 or more, no alignment needed). */

typedef struct ac_row_column {
  const void* source;
  void* target;
  uint64_t row_bytes;
} ac_row_column;

/* Copy row source_rows[i] of every column's source to row target_rows[i] of its target, for i below `count`; NULL means
 * row i. Row indices are 0 or more (else AC_INVALID, and nothing is copied), target rows are distinct, and no target
 * overlaps another one or a source. On `threads` threads (0 = all cores; the caller is one of them). */
AC_API int32_t ac_copy_rows(const ac_row_column* columns, uint64_t columns_count, const int64_t* source_rows,
                            const int64_t* target_rows, uint64_t count, uint32_t threads, ac_error* error);

/* fingerprints[i] for i below rows_count: 0, then for every column in order XXH3-64 of its source's row i with the
 * fingerprint so far as seed. Targets are not used. */
AC_API int32_t ac_fingerprint(const ac_row_column* columns, uint64_t columns_count, uint64_t rows_count,
                              uint64_t* fingerprints, uint32_t threads, ac_error* error);

/* ---- marks: one byte per row, the epoch in which it was last written ---------------------------------------------- */

/* marks[row] = value for every row except -1. Any other row outside [0, marks_count) is AC_INVALID, and no mark is
 * set. */
AC_API int32_t ac_mark(uint8_t* marks, uint64_t marks_count, const int64_t* rows, uint64_t count, uint8_t value,
                       ac_error* error);
/* The rows whose mark is greater than `above`, ascending: `rows` has room for `room` of them; *count is how many there
 * are. If that is more than room, none is written; call again. The marks must not change meanwhile. */
AC_API int32_t ac_marked(const uint8_t* marks, uint64_t marks_count, uint8_t above, int64_t* rows, uint64_t room,
                         uint64_t* count, uint32_t threads, ac_error* error);

/* ---- update: one step of an optimizer on some rows ----------------------------------------------------------------
 * Numbers are float32, AC_FLOAT16 or AC_BFLOAT16 in memory and float32 in between. Every operation is one of IEEE 754,
 * rounded to nearest, in the order of the formulas below (* before + and -, else from left to right), and none is fused
 * with another: the result has the same bits on every processor and in every variant, except the payload of NaN.
 *
 *   g  gradient    w  weight    a, b  numbers of the rule, by name    first, second  slots
 *
 *   AC_RULE_SGD      numbers: lr, weight_decay, momentum, nesterov (0 or 1)    slots: first, if momentum is not 0
 *     d = g + weight_decay * w (if weight_decay is not 0, else g)
 *     if momentum is not 0: first = momentum * first + d; d = d + momentum * first if nesterov, else first
 *     w = w - lr * d
 *   AC_RULE_ADAGRAD  numbers: lr, weight_decay, eps    slots: first
 *     d as above; first = first + d * d; w = w - lr * d / (sqrt(first) + eps)
 *     row-wise: first = first + mean(d * d); w = w - (lr / (sqrt(first) + eps)) * d
 *   AC_RULE_ADAM     numbers: step, weight_decay, kept, 1 - beta1, beta2, 1 - beta2, scale, eps    slots: first, second
 *     w = kept * w (if kept is not 1); d as above; first = first + (1 - beta1) * (d - first)
 *     second = beta2 * second + (1 - beta2) * d * d; w = w - step * first / (sqrt(second) * scale + eps)
 *     row-wise: second = beta2 * second + (1 - beta2) * mean(d * d); w = w - (step / (sqrt(second) * scale + eps)) * first
 *   AC_RULE_FTRL     numbers: 1 / lr, l1, l2    slots: first, second
 *     sum = first + g * g; second = second + g - (sqrt(sum) - sqrt(first)) * (1 / lr) * w; first = sum
 *     q = sqrt(sum) * (1 / lr) + l2; w = (clip(second) - second) / q (if q is above 0, else w stays);
 *     clip(z) is l1 if z > l1, -l1 if z < -l1, else z
 *
 * mean(x) of a row: lane i of 16 is the sum of x[i], x[i + 16], ... in this order; lanes i and i + 8 are added, then i and
 * i + 4, i + 2, i + 1; the sum is multiplied by the float32 nearest to 1 / dim. */

typedef enum ac_rule { AC_RULE_SGD = 0, AC_RULE_ADAGRAD = 1, AC_RULE_ADAM = 2, AC_RULE_FTRL = 3 } ac_rule;
typedef enum ac_float { AC_FLOAT32 = 0, AC_FLOAT16 = 1, AC_BFLOAT16 = 2 } ac_float;

#define AC_RULE_NUMBERS 8u

typedef struct ac_row_update {
  const void* gradient;     /* row i, dim numbers, belongs to rows[i] */
  void* weight;             /* rows_count rows of dim numbers, as the slots; nothing overlaps anything else */
  void* first;              /* NULL where the rule has no such slot */
  void* second;
  uint8_t* marks;           /* NULL, or rows_count of them: marks[row] = mark for every row */
  const float* numbers;     /* AC_RULE_NUMBERS of them */
  uint64_t rows_count;
  uint64_t dim;             /* 1 or more */
  uint32_t rule;
  uint32_t gradient_float;  /* an ac_float */
  uint32_t weight_float;
  uint32_t first_float;
  uint32_t second_float;
  uint32_t rowwise;         /* non-zero: the last slot has one number a row (Adagrad, Adam) */
  uint32_t mark;
} ac_row_update;

/* Update every row of rows (distinct; -1 is skipped). Any other row outside [0, rows_count) is AC_INVALID, and nothing is
 * changed. On `threads` threads (0 = all cores; the caller is one of them). */
AC_API int32_t ac_update_rows(const ac_row_update* update, const int64_t* rows, uint64_t count, uint32_t threads,
                              ac_error* error);

/* ---- id map: int64 id -> row ------------------------------------------------------------------------------------
 * Open addressing over 16-byte (id, row) slots. Any int64 bit pattern is an id. New ids get the row that was freed
 * last, else the next unused row, in the order of their first appearance in the batch, so rows are the same on every
 * machine. */

typedef struct ac_idmap ac_idmap;
AC_API ac_idmap* ac_idmap_new(uint64_t capacity); /* NULL: no memory */
AC_API void ac_idmap_free(ac_idmap* map);
AC_API uint64_t ac_idmap_size(const ac_idmap* map);     /* ids present */
AC_API uint64_t ac_idmap_rows_end(const ac_idmap* map); /* one past the highest row ever used */
AC_API uint64_t ac_idmap_bytes(const ac_idmap* map);    /* memory of the map, used or not */
AC_API const int64_t* ac_idmap_ids(const ac_idmap* map); /* id by row, rows_end long; undefined at free rows; valid until the next insert, reserve or clear */
AC_API int32_t ac_idmap_reserve(ac_idmap* map, uint64_t capacity, ac_error* error);
/* rows: -1 for an absent id. */
AC_API int32_t ac_idmap_find(const ac_idmap* map, const int64_t* ids, uint64_t count, int64_t* rows, ac_error* error);
/* new_rows (may be NULL, else room for count): rows assigned to ids that were absent, in order of appearance.
 * marks (by row; may be NULL): those of the rows that are not 0 become `mark`; rows from marks_count on have none. */
AC_API int32_t ac_idmap_insert(ac_idmap* map, const int64_t* ids, uint64_t count, int64_t* rows, int64_t* new_rows,
                               uint64_t* new_count, uint8_t* marks, uint64_t marks_count, uint8_t mark,
                               ac_error* error);
/* rows: the row each id had, -1 for an absent id (a second mention in the batch is absent). */
AC_API int32_t ac_idmap_remove(ac_idmap* map, const int64_t* ids, uint64_t count, int64_t* rows, ac_error* error);
/* The used rows as ascending maximal ranges [begin, end): `runs` has room for 2 * room values; *count is how many ranges
 * there are (also when that is more than room; call again then). */
AC_API int32_t ac_idmap_runs(const ac_idmap* map, int64_t* runs, uint64_t room, uint64_t* count, ac_error* error);
/* Remove all ids and rows; keep the memory. */
AC_API void ac_idmap_clear(ac_idmap* map);

#ifdef __cplusplus
}
#endif
#endif
