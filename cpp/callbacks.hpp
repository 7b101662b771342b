// Where user code and Python references go when an operation ends: threads of the core may touch neither.
//
// A future's callbacks may issue collectives and block on them, so they need threads that nobody waits for; dropping a
// tensor can take the GIL, so that is left to threads that came from Python.
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
#include <mutex>
#include <vector>

#include "per_process.hpp"

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

// Threads for callbacks. A thread is added whenever a job would have to wait for one, because the others may all be
// blocked in callbacks that need that very job; idle threads leave after a while. None exists before the first job.
class CallbackPool {
 public:
  static CallbackPool& instance() { return per_process<CallbackPool>(); }

  // Runs `job` soon on a thread of the pool. Exceptions are logged. After `stop` the job is leaked, not run.
  void post(std::function<void()> job);

  // No job starts from now on. Waits up to `patience` for running ones. Call without the GIL.
  void stop(std::chrono::milliseconds patience);

 private:
  bool add_thread();
  void serve();

  std::mutex mutex_;
  // Wakes idle threads: a job came, or the end.
  std::condition_variable work_;
  // Wakes `stop`: a thread has left.
  std::condition_variable left_;
  std::deque<std::function<void()>> jobs_;
  size_t idle_ = 0;
  size_t threads_ = 0;
  bool stopped_ = false;
};

// What a finished operation held. Filled by any thread, emptied by user calls; leaked when the interpreter is gone.
class Graveyard {
 public:
  static Graveyard& instance() { return per_process<Graveyard>(); }

  void bury(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors);

  // Drops everything that lies here. Only for threads that may take the GIL. Cheap when empty.
  void drain() {
    if (filled_.load(std::memory_order_relaxed)) empty();
  }

 private:
  struct Grave {
    c10::intrusive_ptr<c10d::Work> work;
    std::vector<at::Tensor> tensors;
  };

  void empty();

  // A hint: written under the mutex, read without it; a drain that misses the newest grave leaves it to the next.
  std::atomic<bool> filled_{false};
  std::mutex mutex_;
  std::vector<Grave> graves_;
};

}  // namespace sagellm
