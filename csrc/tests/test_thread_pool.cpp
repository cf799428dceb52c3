// The pool does all the work of every caller, from any thread and in a forked child.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "check.hpp"
#include "thread_pool.hpp"

using namespace asyncckpt;

namespace {

void count_to(uint32_t goal, uint32_t threads) {
  std::atomic<uint32_t> next{0}, done{0};
  auto work = [&] {
    while (next.fetch_add(1) < goal) done.fetch_add(1);
  };
  ThreadPool::instance().run(threads, work);
  CHECK(done == goal);
}

}  // namespace

TEST(pool_does_all_the_work) {
  for (const uint32_t threads : {0u, 1u, 2u, 3u, 9u}) {
    for (uint32_t goal = 0; goal < 300; ++goal) count_to(goal, threads);
  }
}

TEST(pool_serves_many_callers) {
  std::vector<std::thread> callers;
  for (uint32_t caller = 0; caller < 6; ++caller) {
    callers.emplace_back([caller] {
      for (uint32_t turn = 0; turn < 200; ++turn) count_to(turn * 3, caller + 1);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(pool_is_made_anew_in_a_forked_child) {
  count_to(100, 4);
  const pid_t child = fork();
  if (child == 0) {
    count_to(1000, 4);
    _exit(0);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  count_to(100, 4);
}
