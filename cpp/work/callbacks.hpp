// Threads that run user code and drop Python references when an operation ends. Threads of the core may do neither.
//
// The callbacks of a future may issue collectives and block on them, so they need threads for which no other thread
// waits. Dropping a tensor can take the GIL, so only these threads and threads of the program drop tensors.
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

// Blocks all signals on this thread while the object lives. A thread that is started meanwhile inherits the mask, and
// so leaves signals to the main thread.
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

// Threads that run callbacks. Jobs run one after the other, on the thread that has the turn. A callback may block, on a
// collective or on another callback, and must not hold up the jobs behind it. So a thread that is about to wait in one
// of our calls gives up its turn at once. A thread that stays in a job for some milliseconds (it may be waiting for the
// GIL, or sleep) loses its turn. Each lost turn lengthens the time limit of the next, up to 50 ms. So if a program
// holds the GIL for seconds, only a few dozen threads are started, however many futures complete meanwhile. Idle
// threads exit after a while. No thread exists before the first job.
class CallbackPool {
 public:
  static CallbackPool& instance() { return per_process<CallbackPool>(); }

  // Largest number of threads. If that many callbacks are blocked, further jobs wait for them.
  static constexpr size_t kMostThreads = 256;

  // Runs `job` soon on a thread of the pool, or at once on this thread if the pool has none and can start none.
  // Exceptions are logged. After `stop` the job is leaked instead of run.
  void post(std::function<void()> job);

  // The same, but the job does not wait for its turn if only a few others run so. For the end of a future that a job of
  // the pool has requested: this job may be waiting for the future. A future's wait cannot call `about_to_block`, so
  // the job would keep its turn until it lost it, which took 5 ms for each such wait of torch's PowerSGD hook.
  void post_beside(std::function<void()> job);
  // Whether this thread runs a job of the pool.
  static bool runs_this_thread();

  // Call this before a wait for an operation. If this thread belongs to the pool, another one takes the next job.
  static void about_to_block();

  // Waits up to `patience` until no job is queued or running.
  void settle(std::chrono::milliseconds patience);

  // From now on no job starts. Waits up to `patience` until all threads have exited. Call without the GIL.
  void stop(std::chrono::milliseconds patience);

 private:
  using Clock = std::chrono::steady_clock;

  void add_thread();
  void serve();
  // Takes the first job. It is on the heap, so that unwinding of the thread does not destroy the objects that the job
  // owns (see `run_logged`).
  static std::function<void()>* take(std::deque<std::function<void()>>& from);
  // Runs a job without the lock, in its turn or, with 0, beside the job that has the turn.
  void run(std::unique_lock<std::mutex>& lock, std::function<void()>* job, uint64_t turn);
  // Makes sure that a thread takes the next job, now or when the current turn has lasted too long. Call with the lock.
  void call_a_thread();
  void give_turn_away(uint64_t turn);
  Clock::time_point turn_ends() const;

  std::mutex mutex_;
  // Wakes idle threads: a job was posted, the turn is free, or the pool was stopped.
  std::condition_variable work_;
  // Notified when a thread exits.
  std::condition_variable left_;
  std::deque<std::function<void()>> jobs_;
  // Jobs that do not wait for their turn, and the number of those that run.
  static constexpr size_t kMostBeside = 8;
  std::deque<std::function<void()>> beside_;
  size_t running_beside_ = 0;
  // Number of the job that has the turn, or 0. `last_turn_` is the last number used, `turn_began_` the start of the
  // turn.
  uint64_t turn_ = 0;
  uint64_t last_turn_ = 0;
  Clock::time_point turn_began_;
  // Numbers of the jobs that lost their turn and still run.
  std::set<uint64_t> slow_;
  // True while an idle thread waits for the end of the turn.
  bool watched_ = false;
  size_t idle_ = 0;
  size_t threads_ = 0;
  // Number of jobs that have begun and not ended.
  size_t running_ = 0;
  bool stopped_ = false;
};

// Drops tensors, on a thread that may take the GIL. When C++ drops its last reference to a tensor that Python has,
// torch takes the GIL, for each tensor anew. For many tensors it is taken once here: a list of 2,000 takes 0.1 ms less.
void drop(std::vector<at::Tensor> tensors) noexcept;

// Holds the references of ended operations until a thread may drop them. Any thread adds references; calls of the
// program drop them. If the interpreter has ended, the references are leaked.
class DeferredRelease {
 public:
  static DeferredRelease& instance() { return per_process<DeferredRelease>(); }

  void add(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors, std::shared_ptr<void> other = {});

  // Drops all references. Only for threads that may take the GIL. Cheap if there are none.
  void release() {
    if (filled_.load(std::memory_order_relaxed)) drop_all();
  }
  bool empty() const { return !filled_.load(std::memory_order_relaxed); }
  // How long references may stay here while the program does not call this package.
  static constexpr auto kPatience = std::chrono::milliseconds(100);
  // For a thread that must not take the GIL: if the oldest reference has been here for `kPatience`, makes a callback
  // thread drop all references.
  void post();

 private:
  struct Grave {
    c10::intrusive_ptr<c10d::Work> work;
    std::vector<at::Tensor> tensors;
    std::shared_ptr<void> other;
  };

  void drop_all();

  // A hint, written under the mutex and read without it. If a thread misses the newest entry, the next call of
  // `release` drops that entry.
  std::atomic<bool> filled_{false};
  std::mutex mutex_;
  std::vector<Grave> graves_;
  // When the oldest entry was added, or when `post` last called a callback thread.
  std::chrono::steady_clock::time_point since_;
};

}  // namespace sagellm
