// c10d's Work for every call of ours: its completion state, and everything that follows its end.
//
// Works differ in how their end is detected, and in what a thread does that waits for them:
// - Operations of the core (`add`): the core detects their end, and the waiting thread drives them.
// - A job on a thread of ours, which calls `end`: the waiting thread sleeps.
// - A stream of a device (device/work.hpp): the waiting thread polls it, or makes its own stream wait for it.
// Works of other backends are wrapped instead (work/joined.hpp).
//
// refused: abort: torch never calls it and has no Python binding for it; abort the group
//
// Ownership: the core holds the `Completion` of an operation until the operation ends. The `Completion` holds the Work
// and the input tensors, so a caller may drop its own references immediately. At the end the `Completion` moves both to
// `DeferredRelease`, because the thread that ended the operation may be a thread of the core.
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
#include "work/callbacks.hpp"
#include "work/hooks.hpp"

namespace sagellm {

// Runs `body` and returns the exception that it throws, or null.
template <class Body>
std::exception_ptr failure_of(const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception&) {
    return std::current_exception();
  }
}

// How long a caller waits. Zero, or c10d's "unset", means until the operation's own deadline, which the core checks.
struct WaitLimit {
  using Clock = std::chrono::steady_clock;

  explicit WaitLimit(std::chrono::milliseconds timeout)
      : given(timeout), until(bounded() ? Clock::now() + timeout : Clock::time_point::max()) {}
  bool bounded() const { return given.count() > 0; }
  bool passed() const { return bounded() && Clock::now() >= until; }
  // Rounded up, because zero would mean no limit.
  std::chrono::milliseconds left() const {
    if (!bounded()) return given;
    return std::max(std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()), std::chrono::milliseconds(1));
  }

  const std::chrono::milliseconds given;
  const Clock::time_point until;
};

class SageWork : public c10d::Work {
 public:
  // Sequence number and timeout of a Work that has no operation of the core to provide them.
  struct Known {
    uint64_t number = 0;
    std::chrono::milliseconds timeout = kNoTimeout;
  };

  // `known` is for a Work that does not end with operations of the core. Such a Work measures its duration itself.
  SageWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
           std::unique_ptr<Trace> trace, std::optional<Known> known = std::nullopt);
  ~SageWork() override { drop(std::move(outputs_)); }

  // Issues `plan` and keeps the tensors in `keep` until the operation has ended. If this throws, nothing was issued.
  void add(const RustGroup& group, Plan& plan, std::vector<at::Tensor> keep);
  // Ends the issuing. Call it after all operations were added or, with an `error`, when no more can be added. The Work
  // cannot end before `seal`, even if an operation ends before `add` returns. So only the issuing thread touches `ops_`
  // before `seal`.
  void seal(const std::string& error = {}) { part_ended(error); }
  // Call this when one of the parts (an operation, or the issuing itself) has ended.
  void part_ended(const std::string& error);
  // Records the error with which the Work will fail, unless it already has one. Call it before the last part ends.
  void note_failure(const std::string& error);
  // Called by the thread that ran the Work's job. `failure` is the exception that the job threw, or null.
  void end(const std::exception_ptr& failure) { end(failure ? coded_text(failure) : std::string(), failure); }

  bool isCompleted() override { return has_ended(); }
  bool isSuccess() const override { return has_ended() && error().empty(); }
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  // Waits for the end: on the CPU the calling thread counts as the current stream.
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
  // Called when the last owner drops the Work while weak references to it remain.
  void release_resources() override;
  // For each of its operations in the core: the algorithm and the record, as JSON.
  virtual std::vector<rust::String> explain() const;

 protected:
  // Ends the Work, once, on any thread, and does everything that follows from the end. Returns false if the Work had
  // already ended. The only user code that runs here is completion hooks. `error` has its code letter or is empty;
  // `failure` is its exception, if there is one.
  bool end(const std::string& error, const std::exception_ptr& failure = nullptr);

  // The parts that differ between Works.

  // True if the Work ends with its operations in the core. Completion is then read from the core, which detects it
  // first.
  bool told_by_core() const { return !ops_.empty(); }
  // Waits until the Work has ended, or until streams will wait in place of this thread. Throws errors that concern this
  // caller alone: its timeout has passed, or a signal handler raised.
  virtual void wait_for_end(const WaitLimit& limit);
  // Runs `body`. If `body` throws the group's failure, records that this thread has got it.
  template <class Body>
  void telling(const Body& body) const;
  // Makes the current stream wait for the results.
  virtual void order() const {}
  // Called when a future that completes at the end of this Work is requested. A Work that nothing else keeps alive must
  // keep itself alive until its end.
  virtual void keep_until_end() {}
  // Calls `body`, which completes a future. If the results are on a device, the stream that made them is then current.
  virtual void on_result_stream(const std::function<void()>& body) const { body(); }
  virtual std::chrono::nanoseconds duration() const;

  // The profiler or a hook needs the end of the Work, even if the program drops the Work.
  bool is_listened_to() const { return trace_ || expected_ || events_->has_completion_hooks(); }
  // Drives the core's operations to their end. Throws the error of an operation, too.
  void wait_for_core(const WaitLimit& limit) const;
  // Sleeps until another thread calls `end`, at most for `slice` and not beyond `limit`. True if the Work has ended.
  bool sleep(std::chrono::microseconds slice, const WaitLimit& limit);
  // Throws the exception of Python's signal handlers, or an error if the caller's timeout has passed.
  void check_caller(const WaitLimit& limit) const;
  bool core_ended() const;
  bool has_ended() const;
  // The error with which the Work failed or will fail, with its code letter; empty if there is none.
  std::string error() const;

 private:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  void complete(c10::ivalue::Future& future, bool with_code) const;
  FuturePtr future_in(FuturePtr& slot, const c10::TypePtr& type, bool with_code);
  void tell_hooks(const std::string& error);

  const std::shared_ptr<Events> events_;
  const std::unique_ptr<Trace> trace_;
  const bool timed_;
  // True if the work hook was registered at issue, and so must learn of the Work's end.
  const bool expected_;
  const uint64_t key_;

 protected:
  // Changed only in `release_resources`, when there is no other owner.
  std::vector<at::Tensor> outputs_;
  const Known known_;
  // Time of issue. Not set for operations of the core, unless the work hook needs it.
  const std::chrono::steady_clock::time_point began_;
  c10::SmallVector<rust::Box<RustOp>, 1> ops_;
  // Devices of the results, for futures; empty on the CPU. This field and the next are set before any other thread sees
  // the Work.
  std::vector<c10::Device> devices_;
  // The value's future completes at issue: a stream that uses the value waits for the results.
  bool value_at_issue_ = false;

 private:
  // Number of operations that have not ended, plus one for the issuing. Each part decrements it when it ends. The last
  // part sees everything that the other parts wrote.
  std::atomic<size_t> parts_{1};
  // True if `error_` is an error. Set under the mutex: for a failed copy before the core reports the operation's end,
  // and otherwise by `part_ended` or `end`. A waiting thread reads it without the mutex, after the end.
  std::atomic<bool> failed_{false};

  // The base's `mutex_` guards these fields and the base's `completed_` and `exception_` (the exception of a job). If
  // the future exists when `completed_` is set, `end` completes the future. Otherwise `getFuture` completes it.
  std::string error_;
  std::chrono::steady_clock::time_point ended_at_;
  FuturePtr future_;
  FuturePtr code_future_;
  // The queue of `CallbackPool` in which the futures complete.
  size_t queue_ = 0;
  // Set by the first request of a future, until the futures have completed; null outside a step.
  std::shared_ptr<void> held_in_step_;
};

// Runs `job` on a callback thread; `work` ends with the job. Waits for `work` and returns null unless `async`.
c10::intrusive_ptr<c10d::Work> in_background(c10::intrusive_ptr<SageWork> work, bool async, std::function<void()> job);
// Waits for these Works. Ignores their errors, because each Work reports its own.
void wait_quietly(const std::vector<c10::intrusive_ptr<c10d::Work>>& works);

// The callbacks of one operation: they copy its staged tensors, and end its Work. A copy from or to a device blocks the
// thread that drives the operation until the copy is done.
class Pending final : public Completion {
 public:
  // `work` is null for a synchronous call, because its caller waits in the core and needs no notification.
  Pending(c10::intrusive_ptr<SageWork> work, std::vector<at::Tensor> keep, Plan& plan);

  void prepare() const override { copy(false); }
  void store_back() const override { copy(true); }
  void ended(rust::Str error) const override;

  // Why a copy failed, with its code letter, or empty. Read it after the operation has ended.
  const std::string& copy_error() const { return copy_error_; }

 private:
  void copy(bool back) const;

  // No lock is needed, because the core calls the functions in order, each at most once.
  mutable c10::intrusive_ptr<SageWork> work_;
  mutable std::vector<at::Tensor> keep_;
  mutable std::vector<Staged> before_;
  mutable std::vector<Staged> after_;
  const std::function<void()> prepare_;
  const std::optional<c10::Stream> copies_on_;
  mutable std::string copy_error_;
};

}  // namespace sagellm
