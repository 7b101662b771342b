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
#include <unordered_map>
#include <utility>
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
  // The next two are for captured calls: whether it must be kept for replays, and the error by which a replay will not
  // end, or empty.
  bool keeps_memory() const { return core_->keeps_memory(); }
  std::string look_at_replays() const { return std::string(core_->look_at_replays()); }
  // Aborts the communicators of the group, which may take long.
  void abort() const { core_->abort(); }
  // Checks a launch that has not returned, from another thread. Empty, or the error for which the launch must not go
  // on; then the group has failed, and `abort` makes the launch return.
  std::string look_at_launch() const { return std::string(core_->look_at_launch()); }
  // How the library runs it, as `SageWork::explain`.
  std::vector<rust::String> explain() const;

 private:
  const rust::Box<RustCall> core_;
};

// The end of the last collective on each stream, for barriers. An entry goes when its call has ended.
class LastEnds {
 public:
  using EventPtr = std::shared_ptr<c10::Event>;

  void put(const c10::Stream& stream, EventPtr ended);
  void passed(const c10::Stream& stream, const EventPtr& ended);
  std::unordered_map<c10::Stream, EventPtr> all();

 private:
  std::mutex mutex_;
  std::unordered_map<c10::Stream, EventPtr> ends_;
};

// A call on its stream, from its launch until its end, which a thread of the shim detects. It keeps what the device
// needs until then, and not its Work: when the program drops that, its results go.
class DeviceRun final {
 public:
  struct Launched {
    c10::Stream stream;
    // Null where no times are measured.
    std::shared_ptr<c10::Event> begun;
    std::shared_ptr<c10::Event> ended;
    // Tensors that must be kept until the device has passed the operation, or until the caller's stream is behind it.
    std::vector<at::Tensor> keep;
    // The caller's stream at issue, on which its tensors were allocated.
    c10::Stream callers;
    // `wait` returns when the work is done, as users of a barrier expect.
    bool blocks_host = false;
    // Events on other devices, which must have passed before it is done.
    std::vector<std::shared_ptr<c10::Event>> earlier{};
    std::shared_ptr<DeviceCall> call{};
    // What follows if it fails. Null where its end is not looked for.
    std::shared_ptr<Failure> failure{};
    // The thread as whose call `failure` counts it, or 0.
    pid_t issuer = 0;
    // Where `ended` was put, or null.
    std::shared_ptr<LastEnds> last{};
    // The operation's name in error texts; a string literal.
    const char* op = "operation";
    SageWork::Known known{};
  };

  DeviceRun(Launched launched, std::shared_ptr<Events> events);

  // Call these two before any other thread sees this. `hold` keeps the Work alive until its end, for the profiler or a
  // hook.
  void set_work(const c10::intrusive_ptr<SageWork>& work);
  void hold(const c10::intrusive_ptr<SageWork>& work) { held_ = work; }
  // True when it has ended; then the Work has, too. May be called on any thread. Polls the device for up to `spin`.
  bool poll(std::chrono::microseconds spin = std::chrono::microseconds(0));
  bool overdue() const;
  // Ends the run and its Work. `idle`: the device no longer uses the tensors, so they are released; otherwise they are
  // leaked.
  void end(const std::string& error, bool idle);
  // It failed, or will never end: waits throw `error` (with its code letter). The group has failed.
  void fail(const std::string& error, bool idle = false);
  // Querying the device for the end of the call threw `failure`: the call and the group fail.
  void fail(const std::exception_ptr& failure);
  // Releases the tensors. The caller's stream must be ordered after the run, because the allocator may then reuse their
  // memory on that stream.
  void let_go();

  const Launched& launched() const { return launched_; }
  const c10::Stream& stream() const { return launched_.stream; }

 private:
  bool has_passed() const;
  std::vector<at::Tensor> take_tensors();

  Launched launched_;
  const std::shared_ptr<Events> events_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  // Set by the thread that sees its end, which does everything that follows from it.
  std::atomic<bool> ended_{false};
  // Guards `keep` of `launched_`, briefly.
  std::mutex mutex_;
  // A DeviceWork.
  c10::weak_intrusive_ptr<SageWork> work_;
  // The same; null where only the program holds it.
  c10::intrusive_ptr<SageWork> held_;
};

// Made when all work of the operation is on its stream. It ends when the device has passed that work. On the group's
// stream the tensors are held until then, or until a `wait` has put the caller's stream behind it, so that no allocator
// has to be told of the stream. On the caller's stream none are held, because memory that is freed there is reused only
// after this work.
class DeviceWork final : public SageWork {
 public:
  using Launched = DeviceRun::Launched;

  static c10::intrusive_ptr<DeviceWork> make(int rank, c10d::OpType type, std::vector<at::Tensor> outputs,
                                             std::shared_ptr<Events> events, std::unique_ptr<Trace> trace,
                                             Launched launched);
  // For `make`.
  DeviceWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
             std::unique_ptr<Trace> trace, Launched launched);

  // Hands its run to the watching thread, which detects the end.
  void watch();
  // It was captured into a graph: its event never passes by itself and may not be queried, so the work ends now.
  void settle() { end(std::string()); }
  // Called by its run, once.
  void end_of_run(const std::string& error) { end(error); }

  std::vector<rust::String> explain() const override { return run_->launched().call->explain(); }
  void synchronize() override { order(); }
  void release_resources() override;

 protected:
  // The host waits where there is a timeout, or `blocks_host`.
  void wait_for_end(const WaitLimit& limit) override;
  // Also lets go of the tensors where the current stream is the one that they were allocated on.
  void order() const override;
  void on_result_stream(const std::function<void()>& body) const override;
  std::chrono::nanoseconds duration() const override;

 private:
  std::shared_ptr<DeviceRun> run_;
};

}  // namespace sagellm
