// The Work of what runs on a device's stream: the host is not asked to wait, streams are.
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

#include "device/streams.hpp"
#include "host/per_process.hpp"
#include "work/work.hpp"

namespace sagellm {

// A call as the core knows it: memory that a library was given, which stays until the stream has come past the call;
// what is known of it; whether it will ever end.
class DeviceCall {
 public:
  explicit DeviceCall(rust::Box<RustCall> core) : core_(std::move(core)) {}

  void launch(const std::vector<DevicePlaced>& placed, size_t stream) const;
  struct State {
    // The device has come past the call.
    bool passed;
    // Empty, or why it will not end or ended badly, with its code letter; whatever blocks it has been aborted then.
    std::string error;
  };
  // Never waits. `has_passed` asks the device, and is called so that no graph that another thread captures is broken by
  // it. The statistics hear of the end by this.
  State poll(const std::function<bool()>& has_passed) const;
  // How it travels, as `SageWork::explain`.
  std::vector<Explanation> explain() const;

 private:
  const rust::Box<RustCall> core_;
};

// Made when everything is on its stream. It ends when the stream has come past it, which a thread of the shim sees. On
// a stream of its own it holds the tensors until then, so that no allocator has to be told of the stream; on the
// caller's it holds none, because what is given back there is used again behind it.
class DeviceWork final : public SageWork {
 public:
  struct Launched {
    c10::Stream stream;
    // Null where no times are wanted.
    std::shared_ptr<c10::Event> begun;
    std::shared_ptr<c10::Event> ended;
    // What has to stay until the stream has come past it.
    std::vector<at::Tensor> keep;
    // `wait` returns when the work is done, as users of a barrier expect.
    bool blocks_host = false;
    // On other devices: it is not done before these have come to pass.
    std::vector<std::shared_ptr<c10::Event>> earlier{};
    std::shared_ptr<DeviceCall> call{};
    // Lowered when the work has ended. Null where nobody counts it.
    std::shared_ptr<std::atomic<int64_t>> under_way{};
    // A literal: the operation's name in messages.
    const char* op = "operation";
    Known known{};
  };

  DeviceWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
             std::unique_ptr<Trace> trace, Launched launched);

  // Hands it to the thread that sees its end.
  void watch();
  // It was captured into a graph: it has no end of its own, and nobody may ask for one.
  void settle() { end_on_device({}, true); }
  // It failed, or will never end: waits throw `error` (with its code letter), and the device may still use the tensors.
  void fail(const std::string& error) { end_on_device(error, false); }
  // True when it has ended; then everything that follows from that has been done. Any thread. The device is asked again
  // and again for as long as `spin`.
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
  // `idle`: the device has let go of the tensors.
  void end_on_device(const std::string& error, bool idle);

  Launched launched_;
};

// One thread that asks the events of works on devices whether they have come to pass. It exists while there are any. It
// drops no work: the last reference may take outputs with it that need the interpreter.
class DeviceWatch {
 public:
  using WorkPtr = c10::intrusive_ptr<DeviceWork>;

  static DeviceWatch& instance() { return per_process<DeviceWatch>(); }

  void add(WorkPtr work);
  // True when nobody will see the end of a work any more.
  bool stopped() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stopped_;
  }
  // No event is asked from now on; what is left is leaked. Call without the GIL.
  void stop(std::chrono::milliseconds patience);

 private:
  void serve();
  // Asks the first work of each stream, which the device comes past in order, and others whose deadline has passed.
  // Takes out what has ended; true where something has.
  static bool look(std::vector<WorkPtr>& works);

  std::mutex mutex_;
  std::condition_variable changed_;
  // Not yet seen by the thread.
  std::vector<WorkPtr> added_;
  // It sleeps until somebody calls; otherwise it looks by itself soon.
  bool idle_ = false;
  bool running_ = false;
  bool stopped_ = false;
};

}  // namespace sagellm
