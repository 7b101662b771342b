// The Work of an operation on a device's stream: `wait` makes streams wait, not the host.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/failure.hpp"
#include "device/streams.hpp"
#include "host/per_process.hpp"
#include "work/work.hpp"

namespace sagellm {

// A call as the core knows it: host memory that the library was given, which is kept until the stream has passed the
// call; its number and timeout; and whether it will ever end.
class DeviceCall {
 public:
  explicit DeviceCall(rust::Box<RustCall> core) : core_(std::move(core)) {}

  void launch(const std::vector<DevicePlaced>& placed, size_t stream) const;
  // It was not launched, or its launch was not completed: the group fails, on all ranks.
  void failed_here(const std::string& why) const;
  struct State {
    // The device has passed the call, and it is known whether it has ended well.
    bool passed;
    // Empty, or the error, with its code letter, by which the call failed or will never end; then the group has failed,
    // and `abort` is to be called when the program has been told.
    std::string error;
  };
  // Never waits. `has_passed` asks the device, and is called in a mode in which it breaks no graph that another thread
  // captures. Records the end in the statistics.
  State poll(const std::function<bool()>& has_passed) const;
  // Ends the communicators of the group, which may last.
  void abort() const { core_->abort(); }
  // How the library runs it, as `SageWork::explain`.
  std::vector<Explanation> explain() const;

 private:
  const rust::Box<RustCall> core_;
};

// Made when all work of the operation is on its stream. It ends when the device has passed that work, which a thread of
// the shim detects. On the group's stream it holds the tensors until then, so that no allocator has to be told of the
// stream. On the caller's stream it holds none, because memory that is freed there is reused only after this work.
class DeviceWork final : public SageWork {
 public:
  struct Launched {
    c10::Stream stream;
    // Null where no times are measured.
    std::shared_ptr<c10::Event> begun;
    std::shared_ptr<c10::Event> ended;
    // Tensors that must be kept until the device has passed the operation.
    std::vector<at::Tensor> keep;
    // `wait` returns when the work is done, as users of a barrier expect.
    bool blocks_host = false;
    // Events on other devices, which must have passed before it is done.
    std::vector<std::shared_ptr<c10::Event>> earlier{};
    std::shared_ptr<DeviceCall> call{};
    // What follows if it fails. Null where its end is not looked for.
    std::shared_ptr<Failure> failure{};
    // The thread as whose call `failure` counts it, or 0.
    pid_t issuer = 0;
    // The operation's name in error texts; a string literal.
    const char* op = "operation";
    Known known{};
  };

  DeviceWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
             std::unique_ptr<Trace> trace, Launched launched);

  // Hands it to the watching thread, which detects its end.
  void watch();
  // It was captured into a graph: its event never passes by itself and may not be queried, so the work ends now.
  void settle() { end_on_device({}, true); }
  // It failed, or will never end: waits throw `error` (with its code letter), and the device may still use the tensors.
  // The group has failed.
  void fail(const std::string& error, bool idle = false);
  // The device cannot be asked for its end: the group fails.
  void fail(const std::exception_ptr& failure);
  // True when it has ended; then futures and hooks have been told. May be called on any thread. Polls the device for up
  // to `spin`.
  bool poll(std::chrono::microseconds spin = std::chrono::microseconds(0));
  const c10::Stream& stream() const { return launched_.stream; }
  bool overdue() const;

  std::vector<Explanation> explain() const override { return launched_.call->explain(); }
  void synchronize() override { order(); }

 protected:
  // The host waits where there is a timeout, or `blocks_host`.
  void wait_for_end(const WaitLimit& limit) override;
  void order() const override;
  void on_result_stream(const std::function<void()>& body) const override;
  std::chrono::nanoseconds duration() const override;

 private:
  bool has_passed() const;
  // `idle`: the device no longer uses the tensors.
  void end_on_device(const std::string& error, bool idle);

  Launched launched_;
};

// The watching thread: polls the events of works on devices. It runs while there are such works. It never drops the
// last reference to a work, because freeing the work's outputs may need the interpreter.
class DeviceWatch {
 public:
  using WorkPtr = c10::intrusive_ptr<DeviceWork>;

  static DeviceWatch& instance() { return per_process<DeviceWatch>(); }

  void add(WorkPtr work);
  // True when the thread has stopped, so that no further end is detected.
  bool stopped() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stopped_;
  }
  // Stops the thread: no event is queried from now on, and works that have not ended are leaked. Call without the GIL.
  void stop(std::chrono::milliseconds patience);

 private:
  void serve();
  // Polls the first work of each stream, because a stream passes its works in order, and works whose deadline has
  // passed. Removes the works that have ended; true where there was one.
  static bool look(std::vector<WorkPtr>& works);

  std::mutex mutex_;
  std::condition_variable changed_;
  // Works that the thread has not taken over yet.
  std::vector<WorkPtr> added_;
  // The thread sleeps until `changed_` is notified; otherwise it polls again soon.
  bool idle_ = false;
  bool running_ = false;
  bool stopped_ = false;
};

}  // namespace sagellm
