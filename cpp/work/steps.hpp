// How long a training step waits for communication. The program opens a step on one of its threads; `StepMeter` adds up
// two times of that thread:
// - in a call of ours: a synchronous call, issuing an asynchronous one, a wait for a Work;
// - outside such calls, the time during which the thread does not run while a future of ours is pending. Code such as
//   DistributedDataParallel waits for futures inside torch, where this class sees no call. A thread that waits does not
//   run. The time also counts if the thread does not run because another thread occupies the processor.
// A program without an open step pays one relaxed load and a branch for each call.
#pragma once

#include <c10/macros/Macros.h>
#include <ctime>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace sagellm {

// Sums over the steps of this process that have ended, in nanoseconds.
struct StepSums {
  uint64_t count = 0;
  uint64_t took = 0;
  uint64_t in_calls = 0;
  uint64_t in_futures = 0;
  // The time that each of the last `kKept` steps waited for communication, oldest first.
  std::vector<uint64_t> last;
};

// The open step of one thread.
class StepMeter {
 public:
  StepMeter();

  // The meter of this thread, or null if the thread has no open step.
  static StepMeter* open() {
    return C10_LIKELY(open_steps_.load(std::memory_order_relaxed) == 0) ? nullptr : find_open();
  }
  // Opens a step on this thread. A step that is opened inside another one is part of the outer step.
  static void begin();
  // Closes the step that this thread opened last. Only an outermost step is counted, and only if `well` is true.
  static void end(bool well);

  // The thread enters and leaves a call of ours; calls may be nested.
  void enter();
  void leave();
  // The program has got a future. The future counts as pending until the returned object is dropped, on any thread.
  static std::shared_ptr<void> holds_future();

  static StepSums sums();
  static void reset();
  static constexpr size_t kKept = 4096;

 private:
  struct Moment {
    uint64_t wall;
    uint64_t processor;
  };

  static StepMeter* find_open();
  static std::shared_ptr<StepMeter>& of_this_thread();
  Moment moment() const;
  // Both need the mutex.
  void watch_future();
  void stop_watching();

  // Number of open steps in this process. Threads that open and close steps change it, every thread reads it (relaxed:
  // a thread that has an open step has written it itself, and other threads need no order). Zero after a fork.
  static inline std::atomic<size_t> open_steps_{0};
  friend class StepTotals;

  // The processor time of the thread that owns this meter.
  clockid_t processor_clock_{};
  // Only the owning thread uses these.
  size_t open_ = 0;
  size_t depth_ = 0;
  uint64_t began_ = 0;
  uint64_t call_began_ = 0;
  uint64_t in_calls_ = 0;

  // Guards the fields below. Threads that complete futures take it, too.
  std::mutex mutex_;
  // Number of pending futures. Written under the mutex; the owning thread also reads it without (relaxed: if the number
  // has changed meanwhile, the mutex decides).
  std::atomic<size_t> futures_{0};
  bool watching_ = false;
  Moment since_{};
  uint64_t in_futures_ = 0;
};

// While this exists, its thread is in a call of ours.
class InCall {
 public:
  InCall() : meter_(StepMeter::open()) {
    if (C10_UNLIKELY(meter_ != nullptr)) meter_->enter();
  }
  ~InCall() {
    if (C10_UNLIKELY(meter_ != nullptr)) meter_->leave();
  }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

 private:
  StepMeter* const meter_;
};

}  // namespace sagellm
