// The threads that copy, touch and digest beside a caller who waits for them.
//
// 1. A caller posts a job with a number of tickets and starts to work on it itself.
// 2. Pool threads that wake up in time take a ticket each and work on the same job.
// 3. When the caller finds no work left it takes back the tickets that nobody took, and waits only for the threads that
//    are inside. So a thread that wakes up late costs nothing.
//
// The pool starts its threads when they are first asked for and keeps them asleep between jobs. It is never destroyed:
// its threads are detached and end with the process. A forked child has none of them, so it forgets the pool.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>

namespace asyncckpt {

class ThreadPool {
 public:
  static ThreadPool& instance();

  // Run `work` on the caller and at the same time on up to `threads` - 1 others; 0 means all cores. `work` takes its
  // share from a common place until nothing is left, and does not throw.
  template <class Work>
  void run(uint32_t threads, Work& work) {
    Job job{[](void* context) { (*static_cast<Work*>(context))(); }, &work};
    run_job(threads, job);
  }

 private:
  struct Job {
    void (*call)(void*);
    void* context;
    uint32_t tickets = 0;
    uint32_t running = 0;
    std::condition_variable ended{};
  };

  void run_job(uint32_t threads, Job& job);
  void start_threads(uint32_t count);
  void serve();
  void wait_for_job(std::unique_lock<std::mutex>& lock);

  std::mutex guard_;
  std::condition_variable posted_;
  std::deque<Job*> jobs_;
  std::atomic<uint32_t> jobs_count_{0};
  uint32_t threads_count_ = 0;
};

}  // namespace asyncckpt
