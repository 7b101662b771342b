// Threads that run user code and drop Python references when an operation ends. Threads of the core may do neither.
//
// The callbacks of a future may issue collectives and block on them, so they need threads for which no other thread
// waits. Dropping a tensor can take the GIL, so only these threads and threads of the program drop tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <signal.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
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

// Threads that run callbacks, from two queues. The jobs of a queue run one after the other, on the thread that has its
// turn. A callback may block, on a collective or on another callback, and must not hold up the jobs behind it. So a
// thread that is about to wait in one of our calls gives up its turn immediately. A thread that stays in a job for some
// milliseconds (it may be waiting for the GIL, or sleep) loses its turn. Each lost turn lengthens the time limit of the
// next, up to 50 ms. So if a program holds the GIL for seconds, only a few dozen threads are started, however many
// futures complete meanwhile. Idle threads exit after a while. No thread exists before the first job.
//
// A wait for a future cannot give up the turn, because torch does not tell us of the wait. So a future that a job has
// requested completes in the other queue: the job may be waiting for it. With one queue, each such wait of torch's
// PowerSGD hook took 5 ms, until the waiting job lost its turn. Futures of the same queue still wait for each other's
// callbacks.
class CallbackPool {
 public:
  static CallbackPool& instance() { return per_process<CallbackPool>(); }

  // Largest number of threads. If that many callbacks are blocked, further jobs wait for them.
  static constexpr size_t kMostThreads = 256;

  // Runs `job` soon on a thread of the pool, or immediately on this thread if the pool has no thread and can start
  // none. Exceptions are logged. After `stop` the job is leaked instead of run.
  void post(std::function<void()> job, size_t queue = 0);
  // Returns the queue in which a future completes that the calling thread requests now.
  static size_t queue_of_futures();

  // Call this before a wait for an operation. If this thread belongs to the pool, another thread takes the next job of
  // this thread's queue.
  static void about_to_block();

  // Waits up to `patience` until no job is queued or running.
  void settle(std::chrono::milliseconds patience);

  // From now on no job starts. Waits up to `patience` until all threads have exited. Call without the GIL.
  void stop(std::chrono::milliseconds patience);

 private:
  using Clock = std::chrono::steady_clock;

  struct Queue {
    std::deque<std::function<void()>> jobs;
    // Number of the job that has the turn, or 0, and the start of its turn.
    uint64_t turn = 0;
    Clock::time_point turn_began;
    // Numbers of the jobs that lost their turn and still run.
    std::set<uint64_t> slow;
  };

  void add_thread();
  void serve();
  // A queue whose first job may run now, or null. A job that has had the turn of its queue for too long loses it.
  Queue* next_queue();
  // Runs the first job of a queue without the lock.
  void run(std::unique_lock<std::mutex>& lock, Queue& queue);
  // If jobs are queued: makes sure that a thread takes the next one, now or when a turn has lasted too long. Call with
  // the lock.
  void call_a_thread();
  void give_turn_away(uint64_t turn);
  bool is_empty() const;
  // Whether a queue has a job and nobody has its turn.
  bool has_ready() const;
  // Of the turns for which other jobs wait: when the first one ends.
  Clock::time_point first_end() const;
  static Clock::time_point turn_ends(const Queue& queue);

  std::mutex mutex_;
  // Wakes idle threads: a job was posted, a turn is free, or the pool was stopped.
  std::condition_variable work_;
  // Notified when a thread exits.
  std::condition_variable left_;
  std::array<Queue, 2> queues_;
  uint64_t last_turn_ = 0;
  // The end of the turn for which an idle thread waits. The latest possible time if no idle thread waits for one.
  Clock::time_point watched_until_ = Clock::time_point::max();
  size_t idle_ = 0;
  size_t threads_ = 0;
  // Number of threads that were started and have not looked at the queues yet.
  size_t starting_ = 0;
  // Number of jobs that have begun and not ended.
  size_t running_ = 0;
  bool stopped_ = false;
};

// Drops tensors, on a thread that may take the GIL. When C++ drops its last reference to a tensor that Python has,
// torch takes the GIL, for each tensor anew. This function takes it once for all tensors, which saves 0.1 ms for a list
// of 2,000.
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
  // References that are older than this are dropped even if the program does not call this package.
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
