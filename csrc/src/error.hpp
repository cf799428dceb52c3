// How a failure travels inside the core, and how it leaves it.
//
// Inside, a failure is a thrown Error. At the border every C function runs its body in at_border, which turns whatever
// was thrown into an ac_status and an ac_error. Worker threads hand their first failure to a FirstFailure.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

#include "asyncckpt.h"

namespace asyncckpt {

class Error {
 public:
  Error(ac_status status, int sys_errno, uint64_t item, const char* format, ...) __attribute__((format(printf, 5, 6)));
  const ac_error& record() const { return record_; }

 private:
  ac_error record_{};
};

// Raise AC_INVALID unless the caller kept to the contract.
void require(bool kept, const char* what);

// Write the exception that is being handled into `error` (which may be NULL) and return its status.
int32_t report_current(ac_error* error) noexcept;

template <class Body>
int32_t at_border(ac_error* error, Body&& body) noexcept {
  try {
    body();
    if (error != nullptr) *error = ac_error{};
    return AC_OK;
  } catch (...) {
    return report_current(error);
  }
}

// Keeps the first exception of several threads.
class FirstFailure {
 public:
  void keep_current() noexcept;
  bool any() const noexcept { return any_.load(std::memory_order_relaxed); }
  void rethrow();

 private:
  std::mutex guard_;
  std::exception_ptr first_;
  std::atomic<bool> any_{false};
};

}  // namespace asyncckpt
