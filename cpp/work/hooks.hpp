// The profiler and the hooks of c10d, which are notified when an operation ends.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "compat.hpp"
#include "host/per_process.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

// The profiler's record of one call, which ends with the operation. Exists only while a profiler is active.
class Trace {
 public:
  // Returns null if no profiler records; this costs one look at a thread-local list. `title` must be a string literal.
  static std::unique_ptr<Trace> start(const char* title, c10::ArrayRef<at::Tensor> inputs);
  explicit Trace(at::StepCallbacks&& callbacks) : record_(std::move(callbacks)) {}
  // Call it once, on any thread.
  void end();

 private:
  at::RecordFunction record_;
  // The profiler's state at the start. The profiler needs it on the thread where the record ends.
  std::shared_ptr<c10::ThreadLocalDebugInfo> state_;
};

// Hooks of one kind, by the ids that c10d gives them.
template <class Hook>
class HookTable {
 public:
  using Hooks = std::map<int64_t, Hook>;

  void add(int64_t id, Hook hook) {
    edit([&](Hooks& hooks) { hooks[id] = std::move(hook); });
  }
  void remove(int64_t id) {
    edit([&](Hooks& hooks) { hooks.erase(id); });
  }
  bool empty() const { return count_.load(std::memory_order_relaxed) == 0; }
  // Call it without holding a lock.
  std::shared_ptr<const Hooks> all() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return hooks_;
  }

 private:
  template <class Edit>
  void edit(const Edit& change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto hooks = std::make_shared<Hooks>(*hooks_);
    change(*hooks);
    count_.store(hooks->size(), std::memory_order_relaxed);
    hooks_ = std::move(hooks);
  }

  // Number of hooks. A hint: written under the mutex, read by any thread without it. It orders no other memory access.
  std::atomic<size_t> count_{0};
  mutable std::mutex mutex_;
  // Replaced, never changed, so a thread can call the hooks that it got from `all` while the table changes.
  std::shared_ptr<const Hooks> hooks_ = std::make_shared<const Hooks>();
};

// Hooks and switches of one backend. The backend's works share this object, because they may outlive the backend. While
// a hook for the end of works is registered, synchronous calls have a Work, too. Hooks are called without locks. Hooks
// that may run long or take the GIL are called on callback threads.
class Events : public std::enable_shared_from_this<Events> {
 public:
  using WorkHook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  // Records that this thread gets the group's failure as the error of a call, so the failure is not raised in it again
  // by other means.
  void told();
  // Whether the thread with this system id has got the group's failure as the error of a call.
  bool knows(pid_t thread) const;
  // Returns `failure` in the form that a future stores. A thread can wait for a future without calling this package, so
  // the returned exception itself calls `told` when Python raises it in a thread.
  std::exception_ptr told_where_raised(const std::exception_ptr& failure);
  // Number that identifies this group in its process.
  uint64_t key() const { return key_; }

  // True in a forked child of the process that made this object. The threads that end works exist only in the parent.
  bool inherited() const { return process_.inherited(); }

  void enable_timing() { timing_ = true; }
  bool timing() const { return timing_.load(std::memory_order_relaxed); }

  HookTable<AbortHook> abort_hooks;
  // Calls the hooks soon, on a callback thread. A hook may take seconds to write a trace, and the error must not wait
  // for it.
  void call_abort_hooks();
  // Calls the abort hooks if the error is a failure of the group, and not the error of an invalid call.
  void tell_failure(const std::string& coded);

  HookTable<CompletionHook> completion_hooks;
  bool has_completion_hooks() const { return !completion_hooks.empty(); }
  // Calls the hooks on this thread: by c10d's contract they are short and never take the GIL.
  void call_completion_hooks(const CompletionHookArgs& args) const;

  void set_work_hook(WorkHook hook);
  bool has_work_hook() const { return work_hook_set_.load(std::memory_order_relaxed); }
  // `expect_work` announces one work at issue, `work_ended` reports its end. `info` is null if the work failed, because
  // the hook does not get failures.
  void expect_work();
  void work_ended(std::shared_ptr<c10d::WorkInfo> info);
  // Waits up to `slice`. True if all announced works have ended and the hook was called for each that succeeded.
  bool wait_told(std::chrono::milliseconds slice);

 private:
  void tell_work_hook();

  const uint64_t key_ = next_key();
  static uint64_t next_key();
  const ProcessMark process_;
  // The user's thread sets these flags, all threads read them. The flags order no other memory access.
  std::atomic<bool> timing_{false};
  std::atomic<bool> work_hook_set_{false};

  // Guards the fields below.
  mutable std::mutex mutex_;
  // System ids of the threads that have got the group's failure.
  std::set<pid_t> told_;
  WorkHook work_hook_;
  // Ended works for which the hook was not called yet, in the order of their ends. One job at a time calls the hook.
  std::deque<std::shared_ptr<c10d::WorkInfo>> untold_;
  size_t expected_ = 0;
  bool telling_ = false;
  std::condition_variable all_told_;
};

}  // namespace sagellm
