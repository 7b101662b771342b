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

#include "device/streams.hpp"
#include "host/per_process.hpp"
#include "work/work.hpp"

namespace sagellm {

// What is known of work that has not ended.
struct Watched {
  // A literal: the operation's name in messages.
  const char* op = "operation";
  uint64_t number = 0;
  std::chrono::steady_clock::time_point issued = std::chrono::steady_clock::now();
  std::chrono::milliseconds timeout = kNoTimeout;

  bool overdue(std::chrono::steady_clock::time_point now) const {
    return timeout.count() > 0 && now - issued > timeout;
  }
};

// A call as the core knows it: memory that a library was given, which stays until the stream has come past the call;
// what is known of it; whether it will ever end.
class DeviceCall {
 public:
  virtual ~DeviceCall() = default;
  // Empty, or why it will not end or ended badly, with its code letter; whatever blocks it has been aborted then. Never
  // waits. `has_passed` asks the device whether it has come past the call, and is called so that no graph that another
  // thread captures is broken by it; `passed` is set to its answer.
  virtual std::string poll(const std::function<bool()>& has_passed, bool& passed) = 0;
  // Told once, for the statistics. Any thread.
  virtual void ended(bool well) = 0;
  // How it travels, as `SageWork::explain`.
  virtual std::vector<Explanation> explain() const = 0;
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
    Watched watched{};
    std::shared_ptr<DeviceCall> call{};
  };

  DeviceWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
             std::unique_ptr<Trace> trace, Launched launched);

  // Hands it to the thread that sees its end.
  void watch();
  // It was captured into a graph: it has no end of its own, and nobody may ask for one.
  void settle() { end({}, true); }
  const c10::Stream& stream() const { return launched_.stream; }
  const Watched& watched() const { return launched_.watched; }
  // It failed, or will never end: whoever waits hears `error` (with its code letter), and the tensors are let go only
  // where `idle` says that the device has let go of them.
  void fail(const std::string& error, bool idle);
  void abort() override;
  std::vector<Explanation> explain() const override { return launched_.call->explain(); }
  // True when it has ended; then everything that follows from that has been done. Any thread. The device is asked again
  // and again for as long as `spin`.
  bool poll(std::chrono::microseconds spin = std::chrono::microseconds(0));

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
  bool has_passed() const;
  void end(const std::string& error, bool idle);

  Launched launched_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  // Guarded by the base's `mutex_`, as is its `completed_`.
  std::string text_;
  std::chrono::steady_clock::time_point ended_at_;
  c10::intrusive_ptr<c10::ivalue::Future> value_;
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
  // The works of one stream, in the order in which the device comes past them.
  struct Queue {
    c10::Stream stream;
    std::deque<WorkPtr> works;
  };

  void serve();
  // Puts each behind the others of its stream.
  static void sort_in(std::vector<WorkPtr> added, std::vector<Queue>& queues);
  // Asks the first work of each stream, and others whose deadline has passed. True if one has ended.
  static bool look(std::vector<Queue>& queues);

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
