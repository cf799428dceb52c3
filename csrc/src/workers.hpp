// Threads of one long call (a drain, a read): started for it, joined at its end, stopped together.
#pragma once

#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "error.hpp"
#include "thread.hpp"

namespace asyncckpt {

// Whether a long call shall go on: nobody has cancelled it, and none of its threads has failed.
class Stop {
 public:
  explicit Stop(const int32_t* cancel) : cancel_(cancel) {}

  bool requested() const { return failure_.any() || cancelled(); }
  void keep_failure() noexcept { failure_.keep_current(); }
  // Raise what the threads met; after they have been joined.
  void rethrow() { failure_.rethrow(); }
  void throw_if_cancelled() const {
    if (cancelled()) throw Error(AC_CANCELLED, 0, 0, "cancelled");
  }

 private:
  bool cancelled() const { return cancel_ != nullptr && __atomic_load_n(cancel_, __ATOMIC_RELAXED) != 0; }

  const int32_t* cancel_;
  FirstFailure failure_;
};

inline void add_progress(uint64_t* bytes_done, uint64_t bytes) {
  if (bytes_done != nullptr) __atomic_fetch_add(bytes_done, bytes, __ATOMIC_RELAXED);
}

class Workers {
 public:
  explicit Workers(Stop& stop) : stop_(stop) {}
  ~Workers() { join(); }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Run `body` on `count` threads. Where the system gives fewer, the caller does their share of the work later.
  template <class Body>
  void start(const char* name, uint32_t count, Body body) {
    threads_.reserve(threads_.size() + count);
    for (uint32_t index = 0; index < count; ++index) {
      try {
        threads_.push_back(start_thread(name, [this, body] { guarded(body); }));
      } catch (const std::system_error&) {
        return;
      }
    }
  }

  // Run `body` on the calling thread with the same care.
  template <class Body>
  void guarded(Body&& body) noexcept {
    try {
      body();
    } catch (...) {
      stop_.keep_failure();
    }
  }

  void join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  Stop& stop_;
  std::vector<std::thread> threads_;
};

}  // namespace asyncckpt
