// c10d's Work for every call of ours: its completion state, and everything that follows from its end.
//
// Works differ in how their end is detected, and in what a waiting thread does:
//   - operations of the core (`add`): the core knows their end, and the waiting thread moves them;
//   - a thread of ours that calls `end`: the waiting thread sleeps;
//   - a stream of a device (device/work.hpp): the waiting thread asks it, or puts its own stream behind it.
// Works of other backends are forwarded to instead (work/joined.hpp).
//
// refused: abort: torch has no call for it in Python and never makes it; abort the group
//
// Who owns what: the core holds the `Completion` of an operation until it ends; that holds the Work and the input
// tensors, so a caller may drop everything at once. When the operation has ended the completion gives both to the
// graveyard, because the thread that ended it may be one of the core's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "compat.hpp"
#include "host/errors.hpp"
#include "host/host.hpp"
#include "lower/plan.hpp"
#include "work/hooks.hpp"

namespace sagellm {

// What `body` throws, or null.
template <class Body>
std::exception_ptr failure_of(const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception&) {
    return std::current_exception();
  }
}

// How long a caller waits. No time, or c10d's "unset", means until the operation's own deadline, which the core checks.
struct WaitLimit {
  using Clock = std::chrono::steady_clock;

  explicit WaitLimit(std::chrono::milliseconds timeout)
      : given(timeout), until(bounded() ? Clock::now() + timeout : Clock::time_point::max()) {}
  bool bounded() const { return given.count() > 0; }
  bool passed() const { return bounded() && Clock::now() >= until; }
  // Rounded up, because no time at all would mean no limit.
  std::chrono::milliseconds left() const {
    if (!bounded()) return given;
    return std::max(std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()), std::chrono::milliseconds(1));
  }

  const std::chrono::milliseconds given;
  const Clock::time_point until;
};

class SageWork : public c10d::Work {
 public:
  // The facts that no operation of the core provides.
  struct Known {
    uint64_t number = 0;
    std::chrono::milliseconds timeout = kNoTimeout;
  };

  // `known` is for a Work whose end is not that of operations of the core; its time is measured here.
  SageWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
           std::unique_ptr<Trace> trace, std::optional<Known> known = std::nullopt);

  // Issues `plan` and keeps the tensors in `keep` until it has ended. When this throws, nothing was issued.
  void add(const RustGroup& group, Plan& plan, std::vector<at::Tensor> keep);
  // All were added, or (`error` is not empty) no more can be: from now on the Work may end. Until then only the issuing
  // thread touches the operations, so an operation may end before `add` returns.
  void seal(const std::string& error = {}) { part_ended(error); }
  // One of the parts (an operation, or the issuing itself) has ended.
  void part_ended(const std::string& error);
  // Records the error by which it will fail, unless it has one already. Call it before the last part ends.
  void note_failure(const std::string& error);
  // Called by the thread whose job this is, with what the job threw.
  void end(const std::exception_ptr& failure) { end(failure ? coded_text(failure) : std::string(), failure); }

  bool isCompleted() override { return has_ended(); }
  bool isSuccess() const override { return has_ended() && error().empty(); }
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  // The CPU's stream is the calling thread.
  void blockCurrentStream() override { synchronize(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;
#ifdef SAGELLM_HAS_WORK_TIMEOUT
  std::chrono::milliseconds getTimeout() const override;
#endif
#ifdef SAGELLM_HAS_COMPLETION_HOOKS
  uint64_t getCompletionKey() const override { return key_; }
#endif
  // Nobody refers to it any more, while an object that only knows of it lives. Called by its last holder.
  void release_resources() override;
  // For each of its operations in the core the algorithm and the record, as JSON.
  virtual std::vector<rust::String> explain() const;

 protected:
  // The end, once, on whatever thread, and everything that follows from it; false where it had ended. Runs no user code
  // here. `error` has its code letter or is empty; `failure` is its exception, where there is one.
  bool end(const std::string& error, const std::exception_ptr& failure = nullptr);

  // The parts that differ between Works.

  // True where the Work ends with its operations in the core. Then completion is read from the core, which learns of it
  // first.
  bool told_by_core() const { return !ops_.empty(); }
  // Waits until the Work has ended, or until streams will wait in place of this thread. Raises errors of this caller
  // alone: its time has passed, or a signal handler raised.
  virtual void wait_for_end(const WaitLimit& limit);
  // What `body` throws reaches the program on this thread.
  template <class Body>
  void telling(const Body& body) const;
  // Makes the current stream wait for the results.
  virtual void order() const {}
  // Calls `body`, which completes a future; where the results are on a device, with the stream that made them as the
  // current one.
  virtual void on_result_stream(const std::function<void()>& body) const { body(); }
  virtual std::chrono::nanoseconds duration() const;

  // The profiler or a hook waits for its end, also where the program has dropped it.
  bool is_listened_to() const { return trace_ || expected_ || events_->has_completion_hooks(); }
  // Drives the core's operations to their end. Also raises the error of an operation.
  void wait_for_core(const WaitLimit& limit) const;
  // Sleeps until another thread calls `end`, at most for `slice`; true when it has.
  bool sleep(std::chrono::microseconds slice, const WaitLimit& limit);
  // Raises the exception of Python's signal handlers, or an error where the caller's time has passed.
  void check_caller(const WaitLimit& limit) const;
  bool core_ended() const;
  bool has_ended() const;
  // Empty, or the error by which it failed or will fail, with its code letter.
  std::string error() const;

 private:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  void complete(c10::ivalue::Future& future, bool with_code) const;
  FuturePtr future_in(FuturePtr& slot, const c10::TypePtr& type, bool with_code);
  void tell_hooks(const std::string& error);

  const std::shared_ptr<Events> events_;
  const std::unique_ptr<Trace> trace_;
  const bool timed_;
  // The work hook was there at issue and waits to be told.
  const bool expected_;
  const uint64_t key_;

 protected:
  // Changed by the last holder alone, when it lets go.
  std::vector<at::Tensor> outputs_;
  const Known known_;
  // Not set for operations of the core, unless the work hook wants to know.
  const std::chrono::steady_clock::time_point began_;
  c10::SmallVector<rust::Box<RustOp>, 1> ops_;
  // The devices of the results, for futures; empty on the CPU. This and the next are set before any other thread sees
  // the Work.
  std::vector<c10::Device> devices_;
  // The value's future is complete at issue: a stream that takes the value waits for the results.
  bool value_at_issue_ = false;

 private:
  // Operations that have not ended, and one for the issuing. Each part lowers it; the last one sees everything that the
  // others wrote.
  std::atomic<size_t> parts_{1};
  // True where there is an `error_`. Set under the mutex, before the core reports the end; a waiting thread reads it
  // without the mutex, after the core has reported the end.
  std::atomic<bool> failed_{false};

  // Guarded by the base's `mutex_`, as are its `completed_` and `exception_` (of a job). `completed_` decides who
  // completes a future: `end` one that exists, `getFuture` one that it makes later.
  std::string error_;
  std::chrono::steady_clock::time_point ended_at_;
  FuturePtr future_;
  FuturePtr code_future_;
};

// The callbacks of one operation: the copies of its staged tensors, and its end. A copy from or to a device waits for
// the device, on the thread that moves the operation.
class Pending final : public Completion {
 public:
  // `work` is null for a synchronous call: its caller waits in the core and needs no notification.
  Pending(c10::intrusive_ptr<SageWork> work, std::vector<at::Tensor> keep, Plan& plan);

  void prepare() const override { copy(false); }
  void store_back() const override { copy(true); }
  void ended(rust::Str error) const override;

  // Why a copy failed, with its code letter, or empty. Read after the operation has ended.
  const std::string& copy_error() const { return copy_error_; }

 private:
  void copy(bool back) const;

  // The core promises the order of the moments, each at most once: no lock is needed.
  mutable c10::intrusive_ptr<SageWork> work_;
  mutable std::vector<at::Tensor> keep_;
  mutable std::vector<Staged> before_;
  mutable std::vector<Staged> after_;
  const std::function<void()> prepare_;
  const std::optional<c10::Stream> copies_on_;
  mutable std::string copy_error_;
};

}  // namespace sagellm
