// c10d's Work for what runs on a device's stream: the host is not asked to wait, streams are.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device_streams.hpp"
#include "per_process.hpp"
#include "work.hpp"

namespace sagellm {

// What is known of work that has not ended.
struct Watched {
  // "all_reduce number 7 on device 0 of its kind"
  std::string what;
  uint64_t number = 0;
  std::chrono::steady_clock::time_point issued = std::chrono::steady_clock::now();
  std::chrono::milliseconds timeout = kNoTimeout;
  // The communicator.
  std::shared_ptr<void> member;
};

// Knows when work will never end.
class Guardian {
 public:
  virtual ~Guardian() = default;
  // Empty, or why it will not end, with its code letter; whatever blocks it has been aborted then. Never waits.
  // `passed`: the stream has come past it, so only a failure of the library counts.
  virtual std::string look(const Watched& watched, bool passed) = 0;
  // Asks the device something on this thread, in such a way that no graph that another thread captures is broken by it.
  virtual bool ask(c10::DeviceIndex device, const std::function<bool()>& question) = 0;
};

// Made when everything is on its stream. It ends when the stream has come past it, which a thread of the shim sees;
// until then it holds the tensors, so that no allocator has to be told of the stream.
class DeviceWork final : public SageWork {
 public:
  struct Launched {
    c10::Stream stream;
    // Null where no times are wanted.
    std::shared_ptr<c10::Event> begun;
    std::shared_ptr<c10::Event> ended;
    // All tensors of the call.
    std::vector<at::Tensor> keep;
    // `wait` returns when the work is done, as users of a barrier expect.
    bool blocks_host = false;
    // Who is asked while it has not ended, or null.
    std::shared_ptr<Guardian> guardian{};
    Watched watched{};
    // More that must stay until the stream has come past it: what a library was given on the host.
    std::shared_ptr<void> also{};
    // Told of the end, for the statistics; may be null.
    std::function<void(bool)> told{};
    // How it travels, for `explain`.
    std::function<std::vector<std::string>()> explained{};
  };

  DeviceWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
             std::unique_ptr<Trace> trace, Launched launched);

  // Hands it to the thread that sees its end.
  void watch();
  // It failed, or will never end: whoever waits hears `error` (with its code letter), and the tensors are let go only
  // where `idle` says that the device has let go of them.
  void fail(const std::string& error, bool idle);
  void abort() override;
  std::vector<std::string> explain() const override {
    return launched_.explained ? launched_.explained() : std::vector<std::string>();
  }
  // True when it has ended; then everything that follows from that has been done. Any thread.
  bool poll();

  bool isCompleted() override { return done(); }
  // Puts the caller's stream behind the work. A timeout, or `blocks_host`, makes the host wait as well.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { order(); }
  void blockCurrentStream() override { order(); }
  // Complete at once: whoever takes the value is ordered behind it.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return launched_.watched.number; }
  float getDuration() const override;
#ifdef SAGELLM_HAS_WORK_TIMEOUT
  std::chrono::milliseconds getTimeout() const override { return launched_.watched.timeout; }
#endif

 protected:
  bool done() const override;
  std::string error() const override;
  std::chrono::nanoseconds duration() const override;
  void on_result_stream(const std::function<void()>& body) const override;

 private:
  void order() const;
  void end(const std::string& error, bool idle);

  Launched launched_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  // Guarded by the base's `mutex_`, as is its `completed_`.
  std::string text_;
  std::chrono::steady_clock::time_point ended_at_;
  c10::intrusive_ptr<c10::ivalue::Future> value_;
};

// One thread that asks the events of works on devices whether they have come to pass. It exists while there are any.
class DeviceWatch {
 public:
  static DeviceWatch& instance() { return per_process<DeviceWatch>(); }

  void add(c10::intrusive_ptr<DeviceWork> work);
  // True when nobody will see the end of a work any more.
  bool stopped() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stopped_;
  }
  // No event is asked from now on; what is left is leaked. Call without the GIL.
  void stop(std::chrono::milliseconds patience);

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<DeviceWork>> works_;
  bool running_ = false;
  bool stopped_ = false;
};

}  // namespace sagellm
