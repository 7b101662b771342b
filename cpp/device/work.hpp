// The Work of an operation on a device's stream. Its `wait` makes streams wait, not the host.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

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

// A launch, held by the core and kept alive by all who may still ask about it or abort it.
using CallPtr = std::shared_ptr<const RustCall>;
CallPtr shared_call(rust::Box<RustCall> call);

// The end event of the last collective on each stream, for barriers. An entry is removed when its call has ended.
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

// A call on its stream, from its launch until a thread of the shim detects its end. It keeps what the device needs
// until then. It does not keep its Work: when the program drops the Work, the results are freed.
class DeviceRun final {
 public:
  struct Launched {
    c10::Stream stream;
    // Null if no times are measured.
    std::shared_ptr<c10::Event> begun;
    std::shared_ptr<c10::Event> ended;
    // Tensors to keep until the device has passed the operation, or until the caller's stream waits for it.
    std::vector<at::Tensor> keep;
    // The caller's current stream at issue. The caller's tensors were allocated on it.
    c10::Stream callers;
    // `wait` blocks the host until the work is done, for a barrier and for the option `blocking_wait`.
    bool blocks_host = false;
    // Events on other devices. The work is done only when these events have also passed.
    std::vector<std::shared_ptr<c10::Event>> earlier{};
    CallPtr call{};
    // Handles a failure of the call. Null if the end of the call is not watched.
    std::shared_ptr<Failure> failure{};
    // Counts the call as under way until it ends. Empty if `drain` need not wait for the call.
    Failure::UnderWay under_way{};
    // The table that `ended` was put into, or null.
    std::shared_ptr<LastEnds> last{};
    // The operation's name in error texts; a string literal.
    const char* op = "operation";
    SageWork::Known known{};
  };

  DeviceRun(Launched launched, std::shared_ptr<Events> events);

  // Call this before any other thread sees the run.
  void set_work(const c10::intrusive_ptr<SageWork>& work);
  // Keeps the Work alive until its end, for the profiler, for a hook, or for a future that completes at the end. The
  // caller has a reference to the Work.
  void hold(const c10::intrusive_ptr<SageWork>& work);
  // Polls the device for up to `spin`. True if the run has ended: the Work has then ended, or another thread is just
  // ending it. May be called on any thread.
  bool poll(std::chrono::microseconds spin = std::chrono::microseconds(0));
  bool overdue() const;
  // Fails the run if its call must be aborted, without asking the device whether the call has passed. May be called on
  // any thread.
  void fail_unasked();
  // Ends the run and its Work. `idle`: the device no longer uses the tensors, so they are released; otherwise they are
  // leaked.
  void end(const std::string& error, bool idle);
  // Ends the run because the call failed or will never end. Waits throw `error`, which has its code letter. The core
  // has already marked the group as failed.
  void fail(const std::string& error, bool idle = false);
  // Querying the device for the end of the call threw `failure`: the call and the group fail.
  void fail(const std::exception_ptr& failure);
  // Releases the tensors. The caller's stream must already wait for the run, because the allocator may then reuse their
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
  // Set under the mutex by the thread that detects the end. That thread does everything that follows from the end.
  // Other threads read this field without the mutex and need no ordering, because they read nothing else of the run.
  std::atomic<bool> ended_{false};
  // Guards `held_` and `launched_.keep`. Never held for long.
  std::mutex mutex_;
  // The run's DeviceWork.
  c10::weak_intrusive_ptr<SageWork> work_;
  // The same Work, if the profiler, a hook or a future needs it to live until its end; else null.
  c10::intrusive_ptr<SageWork> held_;
};

// Made when all work of the operation is on its stream. It ends when the device has passed that work. On the group's
// stream the tensors are held until then, or until a `wait` has made the caller's stream wait for the operation, so no
// allocator needs to know of the group's stream. On the caller's stream no tensors are held, because memory that is
// freed there is reused only after this work.
class DeviceWork final : public SageWork {
 public:
  using Launched = DeviceRun::Launched;

  static c10::intrusive_ptr<DeviceWork> make(int rank, c10d::OpType type, std::vector<at::Tensor> outputs,
                                             std::shared_ptr<Events> events, std::unique_ptr<Trace> trace,
                                             Launched launched);
  // For `make`.
  DeviceWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
             std::unique_ptr<Trace> trace, Launched launched);

  // Hands the run to the watching thread, which detects its end.
  void watch();
  // Called once: by the run, or when a call was captured into a graph, because the event of such a call never passes by
  // itself and must not be queried.
  void settle(const std::string& error) { end(error); }

  std::vector<rust::String> explain() const override;
  void synchronize() override { order(); }
  void release_resources() override;

 protected:
  // The host waits only if there is a timeout or `blocks_host` is set.
  void wait_for_end(const WaitLimit& limit) override;
  // Also releases the tensors if the current stream is the one on which they were allocated.
  void order() const override;
  void keep_until_end() override;
  void on_result_stream(const std::function<void()>& body) const override;
  std::chrono::nanoseconds duration() const override;

 private:
  std::shared_ptr<DeviceRun> run_;
};

}  // namespace sagellm
