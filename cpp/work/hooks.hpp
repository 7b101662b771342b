// What else is notified when an operation ends, besides its Work: the profiler's record, and the hooks of c10d.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "compat.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

// The profiler's record of one call, ended where the operation ends. Exists only while a profiler is active.
class Trace {
 public:
  // Null where no profiler records, which costs one look at a thread-local list. `title` must live for ever.
  static std::unique_ptr<Trace> start(const char* title, c10::ArrayRef<at::Tensor> inputs);
  explicit Trace(at::StepCallbacks&& callbacks) : record_(std::move(callbacks)) {}
  // Once, on any thread.
  void end();

 private:
  at::RecordFunction record_;
  // The profiler finds its state through this, on the thread where the record ends.
  std::shared_ptr<c10::ThreadLocalDebugInfo> state_;
};

// Hooks of one kind, by the numbers that c10d gives them.
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
  // To be called without a lock held.
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

  // A hint, written under the mutex and read by any thread without it; nothing is ordered by it.
  std::atomic<size_t> count_{0};
  mutable std::mutex mutex_;
  // Replaced, never changed, so that a caller keeps what it calls.
  std::shared_ptr<const Hooks> hooks_ = std::make_shared<const Hooks>();
};

// Hooks and switches of one backend. Its works share it, since they may outlive the backend. While a hook for
// the end of works is registered, synchronous calls have a Work, too. Hooks are called without locks; hooks that may
// run long or take the GIL are called on callback threads.
class Events : public std::enable_shared_from_this<Events> {
 public:
  using WorkHook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  // Call it when the failure of the group reaches this thread as the error of a call: then the failure need not be
  // raised there in another way.
  void told();
  // Whether the failure of the group has reached the thread with this system id as the error of a call.
  bool knows(pid_t thread) const;
  // A number that no other group of this process has.
  uint64_t key() const { return key_; }

  // True in a forked child of the process that made this: the threads that end works are the parent's.
  bool inherited() const { return pool_ != &CallbackPool::instance(); }

  void enable_timing() { timing_ = true; }
  bool timing() const { return timing_.load(std::memory_order_relaxed); }

  HookTable<AbortHook> abort_hooks;
  // Soon, on a callback thread: a hook may take seconds to write a trace, and the error must not wait for that.
  void call_abort_hooks();
  // Calls the abort hooks if the error is a failure of the group, not the error of a wrong call.
  void tell_failure(const std::string& coded);

  HookTable<CompletionHook> completion_hooks;
  bool has_completion_hooks() const { return !completion_hooks.empty(); }
  // On this thread: these are short and never take the GIL, by c10d's contract.
  void call_completion_hooks(const CompletionHookArgs& args) const;

  void set_work_hook(WorkHook hook);
  bool has_work_hook() const { return work_hook_set_.load(std::memory_order_relaxed); }
  // Announces one work, from issue until `work_ended`. `info` is null where it failed: the hook is not told of
  // failures.
  void expect_work();
  void work_ended(std::shared_ptr<c10d::WorkInfo> info);
  // True when, within `slice`, the hook has been called for every announced work that ended well.
  bool wait_told(std::chrono::milliseconds slice);

 private:
  void tell_work_hook();

  const uint64_t key_ = next_key();
  static uint64_t next_key();
  // Only compared.
  const CallbackPool* const pool_ = &CallbackPool::instance();
  // Switched by the user's thread, read by all; nothing is ordered by them.
  std::atomic<bool> timing_{false};
  std::atomic<bool> work_hook_set_{false};

  // Guards the rest.
  mutable std::mutex mutex_;
  // Threads that were told of the failure of the group.
  std::set<pid_t> told_;
  WorkHook work_hook_;
  // Works that ended, in that order; one job at a time tells the hook.
  std::deque<std::shared_ptr<c10d::WorkInfo>> untold_;
  size_t expected_ = 0;
  bool telling_ = false;
  std::condition_variable all_told_;
};

}  // namespace sagellm
