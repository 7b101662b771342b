// The thread that detects three things: ends of calls on devices, launches that do not return, and replays that will
// not end.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device/failure.hpp"
#include "device/work.hpp"
#include "host/alarm.hpp"
#include "host/per_process.hpp"

namespace sagellm {

// Polls the events of calls on devices. The thread polls while there are such calls, and for a millisecond after the
// last one has ended. It drops no references itself, because tensors, Works and hooks may need the interpreter.
class DeviceWatch {
 public:
  using RunPtr = std::shared_ptr<DeviceRun>;

  static DeviceWatch& instance() { return per_process<DeviceWatch>(); }

  // Polls the run until its end. If the watching thread cannot be started, ends the run with that error and throws it.
  void add(const RunPtr& run);
  // Checks once a second whether replays of a captured call will end, until the owner of the call drops the call.
  void add_captured(const CallPtr& call, std::shared_ptr<Failure> failure);
  struct Launch {
    CallPtr call;
    // Handles the failure if the launch must be aborted.
    std::shared_ptr<Failure> failure;
    Alarm::Thread thread{Alarm::this_thread(), Alarm::Clock::now()};
  };
  // Registers a launch with the watch for the lifetime of this object. So the launch's deadline applies even if the
  // launch does not return, or if the steps after it cannot be enqueued. The lock is held briefly at the beginning and
  // at the end. The watching thread wakes for the launch, and so need not wake for the call that follows.
  class Launching {
   public:
    Launching(CallPtr call, std::shared_ptr<Failure> failure) : launch_{std::move(call), std::move(failure)} {
      instance().begin(launch_);
    }
    Launching(const Launching&) = delete;
    Launching& operator=(const Launching&) = delete;
    ~Launching() { instance().end(launch_.call); }

   private:
    const Launch launch_;
  };
  // True if the thread has stopped. It then detects no further ends of calls.
  bool stopped() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stopped_;
  }
  // Stops the thread; waits for it at most `patience`. No event is queried from then on, and calls that have not ended
  // are leaked. Call without the GIL.
  void stop(std::chrono::milliseconds patience);

 private:
  void begin(const Launch& launch);
  void end(const CallPtr& call);
  // If the launch must be aborted, handles its failure and returns true.
  static bool ends(const Launch& launch);
  // Ends the launches in `launching` that must be aborted, and empties the list. Call it without `mutex_`.
  void end_overdue(std::vector<Launch>& launching);
  void serve();
  // Polls the first call of each stream in `runs_`, because a stream passes its calls in order. Also polls calls whose
  // deadline has passed. Removes the calls that have ended, and returns true if there was one. Call it without
  // `mutex_`.
  bool look();
  // Runs on a second thread, which never queries the device. A query can hang, for example while another thread loads a
  // kernel and waits for the device to become idle. If this thread finds the watching thread in the same queries twice,
  // half a second apart, it fails the calls that must be aborted. The abort unblocks the device, so the query returns.
  // Two looks are compared instead of clock times, because time also passes while the process is stopped and no query
  // hangs.
  void guard();

  // The captured calls of one group, represented by one call.
  struct Captured {
    std::weak_ptr<const RustCall> call;
    std::shared_ptr<Failure> failure;
  };
  // Checks each group's captured calls. Drops an entry if its call no longer exists or its group has failed. Call it
  // without `mutex_`.
  static void look_at_replays(std::vector<Captured>& captured);
  // Starts the threads that are not running, or wakes the first one. Call it with `mutex_` held, before you add an
  // entry to a list: it throws if it cannot create a thread, and nobody would then look at the entry.
  void start();

  std::mutex mutex_;
  std::condition_variable changed_;
  // Notified when `running_` or `stopped_` changes, for the second thread.
  std::condition_variable ending_;
  std::vector<Captured> captured_;
  std::chrono::steady_clock::time_point looked_;
  // Calls that the thread has not yet moved to `runs_`.
  std::vector<RunPtr> added_;
  // Calls that the watching thread polls. Only this thread changes the list, with `mutex_` held; it reads the list
  // without the mutex. On the heap, because calls that have not ended are leaked when the thread stops.
  std::vector<RunPtr>& runs_ = *new std::vector<RunPtr>();
  // Odd while the watching thread queries the device; the thread adds one before and after its queries. Read by the
  // second thread. Relaxed: it orders no other access.
  std::atomic<uint64_t> queries_{0};
  // Launches that have not returned, and whose group has not failed.
  std::vector<Launch> launching_;
  // True while the thread sleeps until `changed_` is notified; otherwise it polls again soon.
  bool idle_ = false;
  bool running_ = false;
  // Whether the second thread runs; it ends with the first one.
  bool guarding_ = false;
  bool stopped_ = false;
};

}  // namespace sagellm
