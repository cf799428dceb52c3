#include "thread_pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>

#include "cpu.hpp"
#include "thread.hpp"

namespace asyncckpt {
namespace {

constexpr uint32_t threads_max = 256;
// After a job a thread looks for the next one for this long before it sleeps, because copies come in bursts.
constexpr auto spin_time = std::chrono::microseconds(20);

std::atomic<ThreadPool*> the_pool{nullptr};

// Only the forking thread lives on in the child; the pool of the parent stays behind as lost memory.
void forget_pool() { the_pool.store(nullptr); }

const bool fork_is_watched = pthread_atfork(nullptr, nullptr, forget_pool) == 0;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool& ThreadPool::instance() {
  ThreadPool* pool = the_pool.load(std::memory_order_acquire);
  if (pool == nullptr) {
    auto* made = new ThreadPool;
    if (the_pool.compare_exchange_strong(pool, made)) return *made;
    delete made;
  }
  return *pool;
}

void ThreadPool::run_job(uint32_t threads, Job& job) {
  const uint32_t others = std::min(threads == 0 ? cores_count() : threads, threads_max) - 1;
  if (others == 0) return job.call(job.context);
  {
    const std::lock_guard lock(guard_);
    start_threads(others);
    job.tickets = std::min(others, threads_count_);
    if (job.tickets > 0) {
      jobs_.push_back(&job);
      jobs_count_.store(static_cast<uint32_t>(jobs_.size()), std::memory_order_release);
    }
  }
  if (others == 1) {
    posted_.notify_one();
  } else {
    posted_.notify_all();
  }
  job.call(job.context);
  std::unique_lock lock(guard_);
  std::erase(jobs_, &job);
  jobs_count_.store(static_cast<uint32_t>(jobs_.size()), std::memory_order_release);
  job.ended.wait(lock, [&] { return job.running == 0; });
}

void ThreadPool::start_threads(uint32_t count) {
  while (threads_count_ < count) {
    try {
      start_thread("asyncckpt-copy", [this] { serve(); }).detach();
    } catch (const std::system_error&) {
      return;  // The caller works anyway; it is only slower.
    }
    ++threads_count_;
  }
}

void ThreadPool::serve() {
  std::unique_lock lock(guard_);
  for (;;) {
    wait_for_job(lock);
    Job& job = *jobs_.front();
    ++job.running;
    if (--job.tickets == 0) {
      jobs_.pop_front();
      jobs_count_.store(static_cast<uint32_t>(jobs_.size()), std::memory_order_release);
    }
    lock.unlock();
    job.call(job.context);
    lock.lock();
    // Under the lock: the job lies on the caller's stack and is gone once the caller sees zero.
    if (--job.running == 0) job.ended.notify_one();
  }
}

void ThreadPool::wait_for_job(std::unique_lock<std::mutex>& lock) {
  if (!jobs_.empty()) return;
  lock.unlock();
  const auto give_up = std::chrono::steady_clock::now() + spin_time;
  while (jobs_count_.load(std::memory_order_acquire) == 0 && std::chrono::steady_clock::now() < give_up) relax();
  lock.lock();
  posted_.wait(lock, [&] { return !jobs_.empty(); });
}

}  // namespace asyncckpt
