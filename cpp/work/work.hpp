// c10d's Work over operations of the core, and what happens when one ends: futures, hooks, profiler records.
//
// Who owns what: the core holds the `Completion` of an operation until it ends; that holds the Work and the input
// tensors, so a caller may drop everything at once. When the operation has ended the completion gives both to the
// graveyard, because the thread that ended it may be one of the core's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "compat.hpp"
#include "host/host.hpp"
#include "lower/plan.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

// The profiler's record of one call, ended where the operation ends. Exists only while a profiler is active.
class Trace {
 public:
  // Null, at the price of one look at a thread-local list, when nobody records. `title` must live for ever.
  static std::unique_ptr<Trace> start(const char* title, c10::ArrayRef<at::Tensor> inputs);
  explicit Trace(at::StepCallbacks&& callbacks) : record_(std::move(callbacks)) {}
  // Once, on any thread.
  void end();

 private:
  at::RecordFunction record_;
  // The profiler finds its state through this, on the thread where the record ends.
  std::shared_ptr<c10::ThreadLocalDebugInfo> state_;
};

// Hooks and switches of one backend. Its works share it, since they may outlive the backend. Where somebody listens for
// the end of works, synchronous calls have a Work, too. No hook is ever called
// with a lock held, and those that may run long or take the GIL are called on callback threads.
class Events : public std::enable_shared_from_this<Events> {
 public:
  using WorkHook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  // True in a forked child of the process that made this: the threads that end works are the parent's.
  bool inherited() const { return pool_ != &CallbackPool::instance(); }

  void enable_timing() { timing_ = true; }
  bool timing() const { return timing_.load(std::memory_order_relaxed); }

  void add_abort_hook(int64_t id, AbortHook hook);
  void remove_abort_hook(int64_t id);
  // Soon, on a callback thread: a hook may take seconds to write a trace, and the error must not wait for that.
  void call_abort_hooks();

  void add_completion_hook(int64_t id, CompletionHook hook);
  void remove_completion_hook(int64_t id);
  bool has_completion_hooks() const { return completion_count_.load(std::memory_order_relaxed) > 0; }
  // On this thread: these are short and never take the GIL, by c10d's contract.
  void call_completion_hooks(const CompletionHookArgs& args) const;

  void set_work_hook(WorkHook hook);
  bool has_work_hook() const { return work_hook_set_.load(std::memory_order_relaxed); }
  // Announces one work, from issue until `work_ended`; null when it failed, which the hook is not told.
  void expect_work();
  void work_ended(std::shared_ptr<c10d::WorkInfo> info);
  // True when the hook has heard of every announced work that ended well, within `slice`.
  bool wait_told(std::chrono::milliseconds slice);

 private:
  using CompletionHooks = std::map<int64_t, CompletionHook>;

  void tell_work_hook();

  // Only compared.
  const CallbackPool* const pool_ = &CallbackPool::instance();
  std::atomic<bool> timing_{false};
  std::atomic<size_t> completion_count_{0};
  std::atomic<bool> work_hook_set_{false};

  // Guards the rest.
  mutable std::mutex mutex_;
  std::map<int64_t, AbortHook> abort_hooks_;
  // Replaced, never changed, so that a caller keeps what it called.
  std::shared_ptr<const CompletionHooks> completion_hooks_ = std::make_shared<CompletionHooks>();
  WorkHook work_hook_;
  // Works that ended, in that order; one job at a time tells the hook.
  std::deque<std::shared_ptr<c10d::WorkInfo>> untold_;
  size_t expected_ = 0;
  bool telling_ = false;
  std::condition_variable all_told_;
};

// What every Work of ours has in common: results, futures, hooks. `wait` and its like are the subclass's.
class SageWork : public c10d::Work {
 public:
  SageWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
           std::unique_ptr<Trace> trace);

  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override { wait(kNoTimeout); }
  // The CPU's stream is the calling thread.
  void blockCurrentStream() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
#ifdef SAGELLM_HAS_COMPLETION_HOOKS
  uint64_t getCompletionKey() const override { return key_; }
#endif
  // For each operation of the core that it consists of, how it travels and what was recorded.
  virtual std::vector<Explanation> explain() const { return {}; }

 protected:
  // Ended, and how: empty or an error with its code letter.
  virtual bool done() const = 0;
  virtual std::string error() const = 0;
  virtual std::chrono::nanoseconds duration() const = 0;

  // Everything that follows from the end, once, on whatever thread. Runs no user code here.
  void finish(const std::string& error);
  // Sleeps until another thread has set `completed_`, or `timeout` elapses, and raises what the work failed with.
  // Refused in a forked child, which has no such thread.
  void sleep_until_completed(std::chrono::milliseconds timeout);
  // Calls `body`, which tells a future of its value; where the results are on a device, on the stream that made them.
  virtual void on_result_stream(const std::function<void()>& body) const { body(); }

  std::vector<at::Tensor> outputs_;
  // Where the results are, for futures; empty on the CPU. Set before anybody else sees the Work.
  std::vector<c10::Device> devices_;

 private:
  void complete(c10::ivalue::Future& future, bool with_code) const;
  c10::intrusive_ptr<c10::ivalue::Future> future_in(c10::intrusive_ptr<c10::ivalue::Future>& slot,
                                                    const c10::TypePtr& type, bool with_code);
  c10::intrusive_ptr<c10::ivalue::Future> future_in_child(const c10::TypePtr& type, bool with_code);
  void tell_hooks(const std::string& error);

  const std::shared_ptr<Events> events_;
  std::unique_ptr<Trace> trace_;
  const bool timed_;
  // The work hook was there at issue and waits to be told.
  const bool expected_;
  const uint64_t key_;
  const std::chrono::steady_clock::time_point started_;

  // Guarded by the base's `mutex_`. `ended_` decides who completes a future: `finish` one that exists, `getFuture` one
  // that it makes later.
  bool ended_ = false;
  std::string final_error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<c10::ivalue::Future> code_future_;
};

// One or more operations of the core (a coalesced list of several types has several).
class OpWork final : public SageWork {
 public:
  using SageWork::SageWork;

  // Issues `plan` and keeps the tensors in `keep` until it has ended. When this throws, nothing was issued.
  void add(const RustGroup& group, Plan& plan, std::vector<at::Tensor> keep);
  // All were added, or (`error` is not empty) no more can be: from now on the Work may end. Until then only the issuing
  // thread touches the operations, so an operation may end before `add` returns.
  void seal(const std::string& error = {}) { part_ended(error); }
  // One of the parts (an operation, or the issuing itself) has ended.
  void part_ended(const std::string& error);
  // A copy of a staged tensor failed, which the core cannot know. Before the operation ends.
  void note_failure(const std::string& error);
  // How it ended: empty or an error with its code letter.
  std::string failure() const { return error(); }

  bool isCompleted() override { return done(); }
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  int sourceRank() const override;
  uint64_t getSequencenumber() const override;
#ifdef SAGELLM_HAS_WORK_TIMEOUT
  std::chrono::milliseconds getTimeout() const override { return timeout(); }
#endif
  std::vector<Explanation> explain() const override;

 protected:
  bool done() const override;
  std::string error() const override;
  std::chrono::nanoseconds duration() const override;

 private:
  std::chrono::milliseconds timeout() const;

  c10::SmallVector<rust::Box<RustOp>, 1> ops_;
  // Operations that have not ended, and one for the issuing.
  std::atomic<size_t> parts_{1};
  // The first failure of a part; guarded by the base's `mutex_`. `failed_` tells that there is one.
  std::string part_error_;
  std::atomic<bool> failed_{false};
};

// A job on a callback thread, for what the core has no operation for.
class TaskWork final : public SageWork {
 public:
  TaskWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
           std::unique_ptr<Trace> trace, uint64_t number, std::chrono::milliseconds timeout);

  // Called by the job at its end; `failure` is null when it went well.
  void end(std::exception_ptr failure);

  bool isCompleted() override { return done(); }
  bool wait(std::chrono::milliseconds timeout) override;
  std::exception_ptr exception() const override;
  uint64_t getSequencenumber() const override { return number_; }
#ifdef SAGELLM_HAS_WORK_TIMEOUT
  std::chrono::milliseconds getTimeout() const override { return timeout_; }
#endif

 protected:
  bool done() const override;
  std::string error() const override;
  std::chrono::nanoseconds duration() const override;

 private:
  const uint64_t number_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  // Guarded by the base's `mutex_`, as are its `completed_` and `exception_`.
  std::chrono::steady_clock::time_point ended_at_;
  std::string text_;
};

// What the core calls for one operation: the copies of its staged tensors, and its end.
class Pending final : public Completion {
 public:
  // `work` is null for a synchronous call, which waits where it stands and needs to be told nothing.
  Pending(c10::intrusive_ptr<OpWork> work, std::vector<at::Tensor> keep, Plan& plan);

  void copy(bool back) const override;
  void ended(rust::Str error) const override;

  // Why a copy failed, with its code letter, or empty. Read after the operation has ended.
  const std::string& copy_error() const { return copy_error_; }

 private:
  void copy(const std::vector<Staged>& list, bool into_temporaries) const;
  void guarded(const char* what, const std::function<void()>& copies) const;

  // The core promises the order copy, copy back, ended, each at most once: no lock is needed.
  mutable c10::intrusive_ptr<OpWork> work_;
  mutable std::vector<at::Tensor> keep_;
  mutable std::vector<Staged> before_;
  mutable std::vector<Staged> after_;
  std::function<void()> late_;
  mutable std::string copy_error_;
};

}  // namespace sagellm
