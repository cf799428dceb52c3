// Loaded with LD_PRELOAD between a process and libc: counts the file operations below one folder, and at operation N kills
// the process, fails the operation, or cuts a write short. Every operation can be logged for weak_disk.py.
//
// Each operation is one turn: find out which path it is about; take a number; do what the plan says for that number; log.
// Real work is done by raw system calls, so nothing here calls back into a function that is shadowed.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

// Keep in step with shim.py.
enum action { PASS, KILL_BEFORE, KILL_AFTER, FAIL, LIE, SHORT, ZERO, DELAY };
enum kind { OPEN, CREATE, READ, WRITE, TRUNCATE, ALLOCATE, SYNC, RENAME, LINK, MKDIR, UNLINK, RMDIR, CLOSE, MARK };

enum { PATH_MAX_BYTES = 4096 };

static struct {
  char watch[PATH_MAX_BYTES];  // Empty: nothing is watched.
  long at;                     // The number of the operation that is hit; the first one is 0, and -1 is none.
  int action, error;
  unsigned sticky_kinds;       // Bits of the kinds that are hit after operation `at` too.
  int log;                     // A descriptor opened for appending, or -1.
} plan = {.log = -1};
static atomic_long operations_count;
static atomic_long hits_count;

struct record {
  int32_t kind, error;
  int64_t number, offset, bytes;
  uint32_t path_bytes, target_bytes, data_bytes;
  uint32_t killed;  // 1: before the operation, 2: after it.
};

struct turn {
  enum kind kind;
  enum action action;
  long number;
  char path[PATH_MAX_BYTES], target[PATH_MAX_BYTES];
};

static int path_of(int folder, const char *name, char *path) {
  char link[64];
  if (name != NULL && name[0] == '/') {
    return snprintf(path, PATH_MAX_BYTES, "%s", name) < PATH_MAX_BYTES;
  }
  snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
  long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX_BYTES - 1);
  if (length < 0) return 0;
  path[length] = 0;
  if (name == NULL) return 1;
  return snprintf(path + length, (size_t)(PATH_MAX_BYTES - length), "/%s", name) < PATH_MAX_BYTES - length;
}

static void write_log(const struct turn *turn, int error, long offset, long bytes, const void *data, int killed) {
  if (plan.log < 0) return;
  const int keep = turn->kind == WRITE && bytes > 0 && data != NULL;
  struct record record = {turn->kind, error, turn->number, offset, bytes, (uint32_t)strlen(turn->path),
                          (uint32_t)strlen(turn->target), keep ? (uint32_t)bytes : 0, (uint32_t)killed};
  struct iovec parts[4] = {{&record, sizeof record},
                           {(void *)turn->path, record.path_bytes},
                           {(void *)turn->target, record.target_bytes},
                           {(void *)data, record.data_bytes}};
  (void)syscall(SYS_writev, plan.log, parts, 4);
}

// Returns whether the operation is watched; if so it has a number and an action.
static int begin(struct turn *turn, enum kind kind, int folder, const char *name) {
  const int saved = errno;
  const size_t length = strlen(plan.watch);
  if (length == 0) return 0;
  const int found = path_of(folder, name, turn->path);
  errno = saved;
  if (!found || strncmp(turn->path, plan.watch, length) != 0) return 0;
  if (turn->path[length] != '/' && turn->path[length] != 0) return 0;
  turn->kind = kind;
  turn->target[0] = 0;
  turn->number = atomic_fetch_add(&operations_count, 1);
  const int again = turn->number > plan.at && (plan.sticky_kinds >> kind & 1);
  turn->action = turn->number == plan.at || again ? plan.action : PASS;
  if (turn->action != PASS) atomic_fetch_add(&hits_count, 1);
  // A failed close has closed all the same, and a failed open must not lose a descriptor.
  if (kind == CLOSE && turn->action == FAIL) turn->action = LIE;
  if (turn->action == KILL_BEFORE) {
    write_log(turn, 0, 0, 0, NULL, 1);
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
  }
  if (turn->action == DELAY) usleep((useconds_t)plan.error * 1000);
  return 1;
}

static int refused(const struct turn *turn) { return turn->action == FAIL; }

static long end(struct turn *turn, long result, long offset, long bytes, const void *data) {
  int error = result < 0 ? errno : 0;
  if (refused(turn)) {
    error = plan.error, result = -1;
  } else if (turn->action == KILL_AFTER) {
    write_log(turn, error, offset, bytes, data, 2);
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
  }
  write_log(turn, error, offset, bytes, data, 0);
  // The log has what happened; a lie is only told to the caller.
  if (turn->action == LIE && result >= 0) {
    if (turn->kind == OPEN || turn->kind == CREATE) syscall(SYS_close, (int)result);
    error = plan.error, result = -1;
  }
  if (error) errno = error;
  return result;
}

#define OPERATION(kind, folder, name, call, offset, bytes)                   \
  do {                                                                        \
    struct turn turn;                                                         \
    if (!begin(&turn, kind, folder, name)) return call;                       \
    return end(&turn, refused(&turn) ? -1 : call, offset, bytes, NULL);       \
  } while (0)

static int open_at(int folder, const char *name, int flags, mode_t mode) {
  struct turn turn;
  if (!begin(&turn, flags & O_CREAT ? CREATE : OPEN, folder, name)) {
    return (int)syscall(SYS_openat, folder, name, flags, mode);
  }
  return (int)end(&turn, refused(&turn) ? -1 : syscall(SYS_openat, folder, name, flags, mode), 0, flags, NULL);
}

#define OPEN_FUNCTION(function)                               \
  int function(const char *name, int flags, ...) {            \
    va_list rest;                                             \
    va_start(rest, flags);                                    \
    const mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                             \
    return open_at(AT_FDCWD, name, flags, mode);              \
  }
OPEN_FUNCTION(open)
OPEN_FUNCTION(open64)

#define OPENAT_FUNCTION(function)                             \
  int function(int folder, const char *name, int flags, ...) { \
    va_list rest;                                             \
    va_start(rest, flags);                                    \
    const mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                             \
    return open_at(folder, name, flags, mode);                \
  }
OPENAT_FUNCTION(openat)
OPENAT_FUNCTION(openat64)

// A short transfer moves half, by whole pages where there are several; the last byte always moves, so every loop ends.
static size_t moved(const struct turn *turn, size_t bytes) {
  if (turn->action == ZERO) return 0;
  if (turn->action != SHORT || bytes < 2) return bytes;
  return bytes > 8192 ? bytes / 2 / 4096 * 4096 : bytes / 2;
}

static ssize_t transfer(enum kind kind, int fd, void *data, size_t bytes, long offset) {
  const long number = kind == READ ? (offset < 0 ? SYS_read : SYS_pread64) : (offset < 0 ? SYS_write : SYS_pwrite64);
  struct turn turn;
  if (!begin(&turn, kind, fd, NULL)) return syscall(number, fd, data, bytes, offset);
  // A write at the file's own position is logged with the place it goes to.
  const long place = offset < 0 ? syscall(SYS_lseek, fd, 0, SEEK_CUR) : offset;
  const size_t count = moved(&turn, bytes);
  const long result = refused(&turn) ? -1 : count == 0 && bytes > 0 ? 0 : syscall(number, fd, data, count, offset);
  return end(&turn, result, place, result, data);
}

ssize_t write(int fd, const void *data, size_t bytes) { return transfer(WRITE, fd, (void *)data, bytes, -1); }
ssize_t pwrite(int fd, const void *data, size_t bytes, off_t at) { return transfer(WRITE, fd, (void *)data, bytes, at); }
ssize_t pwrite64(int fd, const void *data, size_t bytes, off_t at) { return transfer(WRITE, fd, (void *)data, bytes, at); }
ssize_t read(int fd, void *data, size_t bytes) { return transfer(READ, fd, data, bytes, -1); }
ssize_t pread(int fd, void *data, size_t bytes, off_t at) { return transfer(READ, fd, data, bytes, at); }
ssize_t pread64(int fd, void *data, size_t bytes, off_t at) { return transfer(READ, fd, data, bytes, at); }

static ssize_t read_vector(int fd, const struct iovec *parts, int count, off_t at, int flags) {
  // One part is all that CPython's callers here give; more are passed on and not watched.
  if (count == 1 && flags == 0) return transfer(READ, fd, parts[0].iov_base, parts[0].iov_len, at);
  return syscall(SYS_preadv2, fd, parts, count, at, 0, flags);
}
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t at) { return read_vector(fd, parts, count, at, 0); }
ssize_t preadv64(int fd, const struct iovec *parts, int count, off_t at) { return read_vector(fd, parts, count, at, 0); }
ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
  return read_vector(fd, parts, count, at, flags);
}
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
  return read_vector(fd, parts, count, at, flags);
}

int ftruncate(int fd, off_t bytes) {
  OPERATION(TRUNCATE, fd, NULL, (int)syscall(SYS_ftruncate, fd, bytes), 0, bytes);
}
int ftruncate64(int fd, off_t bytes) { return ftruncate(fd, bytes); }
int fallocate(int fd, int mode, off_t at, off_t bytes) {
  OPERATION(ALLOCATE, fd, NULL, (int)syscall(SYS_fallocate, fd, mode, at, bytes), at, bytes);
}
int fallocate64(int fd, int mode, off_t at, off_t bytes) { return fallocate(fd, mode, at, bytes); }
int fsync(int fd) { OPERATION(SYNC, fd, NULL, (int)syscall(SYS_fsync, fd), 0, 0); }
int fdatasync(int fd) { OPERATION(SYNC, fd, NULL, (int)syscall(SYS_fdatasync, fd), 0, 0); }
int close(int fd) { OPERATION(CLOSE, fd, NULL, (int)syscall(SYS_close, fd), 0, 0); }

int mkdirat(int folder, const char *name, mode_t mode) {
  OPERATION(MKDIR, folder, name, (int)syscall(SYS_mkdirat, folder, name, mode), 0, 0);
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
int unlinkat(int folder, const char *name, int flags) {
  OPERATION(flags & AT_REMOVEDIR ? RMDIR : UNLINK, folder, name, (int)syscall(SYS_unlinkat, folder, name, flags), 0, 0);
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

static int two_names(enum kind kind, int from, const char *source, int to, const char *target, unsigned flags) {
  const long number = kind == LINK ? SYS_linkat : SYS_renameat2;
  struct turn turn;
  if (!begin(&turn, kind, from, source)) return (int)syscall(number, from, source, to, target, flags);
  path_of(to, target, turn.target);
  return (int)end(&turn, refused(&turn) ? -1 : syscall(number, from, source, to, target, flags), 0, 0, NULL);
}
int renameat2(int from, const char *source, int to, const char *target, unsigned flags) {
  return two_names(RENAME, from, source, to, target, flags);
}
int renameat(int from, const char *source, int to, const char *target) {
  return two_names(RENAME, from, source, to, target, 0);
}
int rename(const char *source, const char *target) {
  return two_names(RENAME, AT_FDCWD, source, AT_FDCWD, target, 0);
}
int linkat(int from, const char *source, int to, const char *target, int flags) {
  return two_names(LINK, from, source, to, target, (unsigned)flags);
}
int link(const char *source, const char *target) { return two_names(LINK, AT_FDCWD, source, AT_FDCWD, target, 0); }

// What shim.py calls. Not to be called while another thread works below the watched folder.
void shim_arm(const char *watch, long at, int action, int error, unsigned sticky_kinds, int log) {
  plan.watch[0] = 0;
  plan.at = at, plan.action = action, plan.error = error, plan.sticky_kinds = sticky_kinds, plan.log = log;
  atomic_store(&operations_count, 0);
  atomic_store(&hits_count, 0);
  snprintf(plan.watch, sizeof plan.watch, "%s", watch);
}
// A line of the caller's own in the log.
void shim_mark(long number) {
  struct turn turn = {.kind = MARK, .number = number};
  write_log(&turn, 0, 0, 0, NULL, 0);
}
void shim_disarm(void) { plan.watch[0] = 0; }
long shim_operations_count(void) { return atomic_load(&operations_count); }
long shim_hits_count(void) { return atomic_load(&hits_count); }
