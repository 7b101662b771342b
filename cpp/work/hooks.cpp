#include "work/hooks.hpp"

#include <torch/csrc/Exceptions.h>

#include <string>
#include <vector>

#include "host/alarm.hpp"
#include "host/errors.hpp"
#include "host/host.hpp"

namespace sagellm {

namespace {

// A DistBackendError that records which thread gets it: torch calls `python_type` on the thread that raises the error
// in Python.
class ToldFailure final : public torch::PyTorchError {
 public:
  ToldFailure(const std::string& text, std::shared_ptr<Events> events)
      : PyTorchError(text), events_(std::move(events)) {}

  PyObject* python_type() override {
    events_->told();
    // torch exports no pointer to the class. Its module keeps the class alive.
    return py::module_::import("torch.distributed").attr("DistBackendError").ptr();
  }

 private:
  std::shared_ptr<Events> events_;
};

}  // namespace

std::unique_ptr<Trace> Trace::start(const char* title, c10::ArrayRef<at::Tensor> inputs) {
  std::optional<at::StepCallbacks> callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (C10_LIKELY(!callbacks.has_value())) return nullptr;
  auto trace = std::make_unique<Trace>(std::move(*callbacks));
  // The record may end on another thread. The profiler recognizes such records by this mark.
  trace->record_._setAsync();
  trace->state_ = c10::ThreadLocalDebugInfo::current();
  if (trace->record_.needsInputs()) {
    const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
    trace->record_.before(title, &values);
  } else {
    trace->record_.before(title);
  }
  return trace;
}

void Trace::end() {
  const c10::DebugInfoGuard state(state_);
  record_.end();
}

uint64_t Events::next_key() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

void Events::told() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    told_.insert(Alarm::this_thread());
  }
  Alarm::instance().take_back(key_);
}

bool Events::knows(pid_t thread) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return told_.count(thread) > 0;
}

std::exception_ptr Events::told_where_raised(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const c10::DistBackendError& error) {
    return std::make_exception_ptr(ToldFailure(error.what_without_backtrace(), shared_from_this()));
  } catch (...) {
    return failure;
  }
}

void Events::call_abort_hooks() {
  if (abort_hooks.empty()) return;
  CallbackPool::instance().post([hooks = abort_hooks.all()] {
    for (const auto& entry : *hooks) entry.second();
  });
}

void Events::tell_failure(const std::string& coded) {
  const auto kind = kind_of(coded);
  if (kind == ErrorKind::kTimeout || kind == ErrorKind::kRankFailed || kind == ErrorKind::kMismatch ||
      kind == ErrorKind::kCorrupt) {
    call_abort_hooks();
  }
}

void Events::call_completion_hooks(const CompletionHookArgs& args) const {
  const auto hooks = completion_hooks.all();
  for (const auto& entry : *hooks) {
    try {
      entry.second(args);
    } catch (const std::exception& error) {
      log_line(1, std::string("a completion hook failed: ") + error.what());
    }
  }
}

void Events::set_work_hook(WorkHook hook) {
  const std::lock_guard<std::mutex> lock(mutex_);
  work_hook_set_ = hook != nullptr;
  work_hook_ = std::move(hook);
}

void Events::expect_work() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++expected_;
}

void Events::work_ended(std::shared_ptr<c10d::WorkInfo> info) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --expected_;
    if (info) untold_.push_back(std::move(info));
    if (untold_.empty() || telling_) return all_told_.notify_all();
    telling_ = true;
  }
  CallbackPool::instance().post([self = shared_from_this()] { self->tell_work_hook(); });
}

void Events::tell_work_hook() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!untold_.empty()) {
    const std::shared_ptr<c10d::WorkInfo> info = std::move(untold_.front());
    untold_.pop_front();
    const WorkHook hook = work_hook_;
    lock.unlock();
    try {
      if (hook) hook(info);
    } catch (const std::exception& error) {
      log_line(1, std::string("the hook on completed works failed: ") + error.what());
    }
    lock.lock();
  }
  telling_ = false;
  all_told_.notify_all();
}

bool Events::wait_told(std::chrono::milliseconds slice) {
  std::unique_lock<std::mutex> lock(mutex_);
  return all_told_.wait_for(lock, slice, [this] { return expected_ == 0 && untold_.empty() && !telling_; });
}

}  // namespace sagellm
