// The threads that run user code and drop Python references when an operation ends; threads of the core may do neither.
//
// A future's callbacks may issue collectives and block on them, so they need threads for which no other thread waits.
// Dropping a tensor can take the GIL, so only threads that came from Python do it.
#pragma once

#include <ATen/core/Tensor.h>
#include <signal.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "host/per_process.hpp"

namespace sagellm {

// Signals belong to the main thread; a thread inherits the mask of the one that starts it.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_{};
};

// Threads for callbacks. Jobs run one after the other, on the thread that has the turn. A callback may block, on a
// collective or on another callback, and must not hold up the jobs behind it: a thread that is about to wait in one of
// our calls gives its turn away at once, and one that stays in a job for some milliseconds (it may be asking for the
// GIL, or sleep) loses it. Each loss lengthens the patience with the next, to 50 ms, so a program that keeps the GIL
// for seconds costs a few dozen threads, however many futures end meanwhile. Idle threads leave after a while. None
// exists before the first job.
class CallbackPool {
 public:
  static CallbackPool& instance() { return per_process<CallbackPool>(); }

  // The largest number of threads: if that many callbacks are blocked, further jobs have to wait for them.
  static constexpr size_t kMostThreads = 256;

  // Runs `job` soon on a thread of the pool. Exceptions are logged. After `stop` the job is leaked, not run.
  void post(std::function<void()> job);

  // To be called before a wait for an operation: if this is a thread of the pool, another thread takes the next job.
  static void about_to_block();

  // Waits up to `patience` until no job runs or waits.
  void settle(std::chrono::milliseconds patience);

  // No job starts from now on. Waits up to `patience` for running ones. Call without the GIL.
  void stop(std::chrono::milliseconds patience);

 private:
  using Clock = std::chrono::steady_clock;

  void add_thread();
  void serve();
  void run_next(std::unique_lock<std::mutex>& lock);
  // Call with the lock: makes sure that a thread takes the next job, now or when the turn has lasted too long.
  void call_a_thread();
  void give_turn_away(uint64_t turn);
  Clock::time_point turn_ends() const;

  std::mutex mutex_;
  // Wakes idle threads: a job came, the turn is free, or the end.
  std::condition_variable work_;
  // Wakes `stop`: a thread has left.
  std::condition_variable left_;
  std::deque<std::function<void()>> jobs_;
  // Number of the job that has the turn, or 0, and when the turn began. Every job gets the next number.
  uint64_t turn_ = 0;
  uint64_t last_turn_ = 0;
  Clock::time_point turn_began_;
  // Jobs that lost their turn and still run.
  std::set<uint64_t> slow_;
  // An idle thread waits for the end of the turn.
  bool watched_ = false;
  size_t idle_ = 0;
  size_t threads_ = 0;
  // Jobs that have begun and not ended.
  size_t running_ = 0;
  bool stopped_ = false;
};

// The references that finished operations held. Filled by any thread, emptied by user calls; leaked when the
// interpreter is gone.
class DeferredRelease {
 public:
  static DeferredRelease& instance() { return per_process<DeferredRelease>(); }

  void add(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors, std::shared_ptr<void> other = {});

  // Drops everything that lies here. Only for threads that may take the GIL. Cheap when empty.
  void release() {
    if (filled_.load(std::memory_order_relaxed)) drop_all();
  }
  bool empty() const { return !filled_.load(std::memory_order_relaxed); }
  // How long references lie here where the program calls nothing of ours.
  static constexpr auto kPatience = std::chrono::milliseconds(100);
  // For a thread that may not take the GIL: makes a callback thread drop the references, if the oldest has lain here
  // for `kPatience`.
  void post();

 private:
  struct Grave {
    c10::intrusive_ptr<c10d::Work> work;
    std::vector<at::Tensor> tensors;
    std::shared_ptr<void> other;
  };

  void drop_all();

  // A hint: written under the mutex, read without it; a drain that misses the newest grave leaves it to the next.
  std::atomic<bool> filled_{false};
  std::mutex mutex_;
  std::vector<Grave> graves_;
  // When the oldest of them came.
  std::chrono::steady_clock::time_point since_;
};

}  // namespace sagellm
