#include "error.hpp"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>
#include <system_error>

namespace asyncckpt {

Error::Error(ac_status status, int sys_errno, uint64_t item, const char* format, ...) {
  record_.status = status;
  record_.sys_errno = sys_errno;
  record_.item = item;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(record_.message, sizeof record_.message, format, arguments);
  va_end(arguments);
  if (sys_errno != 0) {
    // std::generic_category is thread safe where strerror is not.
    const std::string reason = std::generic_category().message(sys_errno);
    const size_t used = std::strlen(record_.message);
    std::snprintf(record_.message + used, sizeof record_.message - used, ": %s", reason.c_str());
  }
}

void require(bool kept, const char* what) {
  if (!kept) throw Error(AC_INVALID, 0, 0, "%s", what);
}

int32_t report_current(ac_error* error) noexcept {
  ac_error record{};
  try {
    throw;
  } catch (const Error& failure) {
    record = failure.record();
  } catch (const std::bad_alloc&) {
    record.status = AC_NO_MEMORY;
    std::snprintf(record.message, sizeof record.message, "no memory");
  } catch (const std::system_error& failure) {
    record.status = AC_SYSTEM;
    record.sys_errno = failure.code().value();
    std::snprintf(record.message, sizeof record.message, "%s", failure.what());
  } catch (const std::exception& failure) {
    record.status = AC_INVALID;
    std::snprintf(record.message, sizeof record.message, "%s", failure.what());
  } catch (...) {
    record.status = AC_INVALID;
    std::snprintf(record.message, sizeof record.message, "unknown failure");
  }
  if (error != nullptr) *error = record;
  return record.status;
}

void FirstFailure::keep_current() noexcept {
  const std::lock_guard lock(guard_);
  if (first_ == nullptr) first_ = std::current_exception();
  any_.store(true, std::memory_order_relaxed);
}

void FirstFailure::rethrow() {
  const std::lock_guard lock(guard_);
  if (first_ != nullptr) std::rethrow_exception(first_);
}

}  // namespace asyncckpt
