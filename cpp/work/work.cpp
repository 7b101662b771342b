#include "work/work.hpp"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <utility>

#include "host/errors.hpp"
#include "host/python_host.hpp"

namespace sagellm {

namespace {

constexpr const char* kInherited =
    "sagellm: a forked child cannot wait for an operation of its parent. Wait for it in the parent";

uint64_t next_key() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

c10d::WorkResult result_code(const std::string& error) {
  if (error.empty()) return c10d::WorkResult::SUCCESS;
  return kind_of(error) == ErrorKind::kTimeout ? c10d::WorkResult::TIMEOUT : c10d::WorkResult::COMM_ERROR;
}

// What the world did to the group, as against a wrong call: these call the abort hooks.
bool calls_abort_hooks(const std::string& error) {
  const auto kind = kind_of(error);
  return kind == ErrorKind::kTimeout || kind == ErrorKind::kRankFailed || kind == ErrorKind::kMismatch;
}

}  // namespace

std::unique_ptr<Trace> Trace::start(const char* title, c10::ArrayRef<at::Tensor> inputs) {
  std::optional<at::StepCallbacks> callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (C10_LIKELY(!callbacks.has_value())) return nullptr;
  auto trace = std::make_unique<Trace>(std::move(*callbacks));
  // The end may come on another thread; the profiler tells such events by this mark.
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

void Events::add_abort_hook(int64_t id, AbortHook hook) {
  std::lock_guard<std::mutex> lock(mutex_);
  abort_hooks_[id] = std::move(hook);
}

void Events::remove_abort_hook(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  abort_hooks_.erase(id);
}

void Events::call_abort_hooks() {
  std::map<int64_t, AbortHook> hooks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (abort_hooks_.empty()) return;
    hooks = abort_hooks_;
  }
  CallbackPool::instance().post([hooks = std::move(hooks)] {
    for (const auto& entry : hooks) entry.second();
  });
}

void Events::add_completion_hook(int64_t id, CompletionHook hook) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto hooks = std::make_shared<CompletionHooks>(*completion_hooks_);
  (*hooks)[id] = std::move(hook);
  completion_count_ = hooks->size();
  completion_hooks_ = std::move(hooks);
}

void Events::remove_completion_hook(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto hooks = std::make_shared<CompletionHooks>(*completion_hooks_);
  hooks->erase(id);
  completion_count_ = hooks->size();
  completion_hooks_ = std::move(hooks);
}

void Events::call_completion_hooks(const CompletionHookArgs& args) const {
  std::unique_lock<std::mutex> lock(mutex_);
  const std::shared_ptr<const CompletionHooks> hooks = completion_hooks_;
  lock.unlock();
  for (const auto& entry : *hooks) {
    try {
      entry.second(args);
    } catch (const std::exception& error) {
      log_line(1, std::string("a completion hook failed: ") + error.what());
    }
  }
}

void Events::set_work_hook(WorkHook hook) {
  std::lock_guard<std::mutex> lock(mutex_);
  work_hook_set_ = hook != nullptr;
  work_hook_ = std::move(hook);
}

void Events::expect_work() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++expected_;
}

void Events::work_ended(std::shared_ptr<c10d::WorkInfo> info) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
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

SageWork::SageWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
                   std::unique_ptr<Trace> trace)
    : Work(rank, type),
      outputs_(std::move(outputs)),
      events_(std::move(events)),
      trace_(std::move(trace)),
      timed_(events_->timing()),
      expected_(events_->has_work_hook()),
      key_(next_key()),
      started_(expected_ ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point()) {
  if (expected_) events_->expect_work();
}

bool SageWork::isSuccess() const {
  return done() && error().empty();
}

std::exception_ptr SageWork::exception() const {
  if (!done()) return nullptr;
  const std::string text = error();
  return text.empty() ? nullptr : to_exception(text);
}

int SageWork::sourceRank() const {
  raise(ErrorKind::kBug,
        c10::str("sagellm: source_rank() was asked of ", c10d::opTypeToString(opType_), ", expected a receive"));
}

float SageWork::getDuration() const {
  if (!timed_) {
    raise(ErrorKind::kBug,
          "sagellm: durations are measured only for works that were issued after enable_collectives_timing()");
  }
  if (!done()) raise(ErrorKind::kBug, "sagellm: the duration is known only after the work has completed");
  return std::chrono::duration<float, std::milli>(duration()).count();
}

void SageWork::finish(const std::string& error) {
  if (trace_) trace_->end();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  c10::intrusive_ptr<c10::ivalue::Future> code_future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    final_error_ = error;
    future = future_;
    code_future = code_future_;
  }
  if (future || code_future) {
    auto self = c10::intrusive_ptr<SageWork>::reclaim_copy(this);
    CallbackPool::instance().post([self, future, code_future] {
      if (code_future) self->complete(*code_future, true);
      if (future) self->complete(*future, false);
    });
  }
  tell_hooks(error);
}

void SageWork::tell_hooks(const std::string& error) {
  if (calls_abort_hooks(error)) events_->call_abort_hooks();
  if (error.empty() && events_->has_completion_hooks()) {
    CompletionHookArgs args;
    args.completionKey = key_;
    if (timed_) args.duration_ms = std::chrono::duration<float, std::milli>(duration()).count();
    events_->call_completion_hooks(args);
  }
  if (!expected_) return;
  std::shared_ptr<c10d::WorkInfo> info;
  if (error.empty()) {
    const auto finished = started_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(duration());
    info = std::make_shared<c10d::WorkInfo>(opType_, getSequencenumber(), started_, finished, duration());
  }
  events_->work_ended(std::move(info));
}

void SageWork::complete(c10::ivalue::Future& future, bool with_code) const {
  if (with_code) {
    future.markCompleted(c10::IValue(static_cast<int64_t>(result_code(final_error_))));
  } else if (final_error_.empty()) {
    on_result_stream([&] { future.markCompleted(c10::IValue(outputs_)); });
  } else {
    future.setError(exception());
  }
}

void SageWork::sleep_until_completed(std::chrono::milliseconds timeout) {
  if (events_->inherited()) raise(ErrorKind::kInvalid, kInherited);
  if (!done()) CallbackPool::about_to_block();
  // Signals of Python are looked for this often; the job itself ends by the deadlines of its operations.
  constexpr auto kSlice = std::chrono::milliseconds(100);
  const bool bounded = timeout.count() > 0;
  const auto until = std::chrono::steady_clock::now() + timeout;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto next_look = [&] {
    const auto look = std::chrono::steady_clock::now() + kSlice;
    return bounded ? std::min(look, until) : look;
  };
  while (!cv_.wait_until(lock, next_look(), [this] { return completed_; })) {
    lock.unlock();
    if (check_interrupt()) std::rethrow_exception(take_interrupt());
    if (bounded && std::chrono::steady_clock::now() >= until) {
      raise(ErrorKind::kTimeout, c10::str("sagellm ", c10d::opTypeToString(opType_), ": wait(", timeout.count(),
                                          " ms) elapsed; the operation goes on"));
    }
    lock.lock();
  }
  const std::exception_ptr failure = exception_;
  lock.unlock();
  if (failure) std::rethrow_exception(failure);
}

c10::intrusive_ptr<c10::ivalue::Future> SageWork::future_in_child(const c10::TypePtr& type, bool with_code) {
  const auto future = c10::make_intrusive<c10::ivalue::Future>(type, with_code ? std::vector<c10::Device>() : devices_);
  // A thread of the parent may have held the mutex at the fork.
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  const bool ended = lock.owns_lock() && ended_;
  if (lock.owns_lock()) lock.unlock();
  if (ended) {
    complete(*future, with_code);
  } else {
    future->setError(to_exception(coded(ErrorKind::kInvalid, kInherited)));
  }
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> SageWork::future_in(c10::intrusive_ptr<c10::ivalue::Future>& slot,
                                                            const c10::TypePtr& type, bool with_code) {
  if (events_->inherited()) return future_in_child(type, with_code);
  std::unique_lock<std::mutex> lock(mutex_);
  if (slot) return slot;
  slot = c10::make_intrusive<c10::ivalue::Future>(type, with_code ? std::vector<c10::Device>() : devices_);
  const auto future = slot;
  const bool complete_here = ended_;
  lock.unlock();
  // It has no callback yet, so this runs none.
  if (complete_here) complete(*future, with_code);
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> SageWork::getFuture() {
  return future_in(future_, c10::ListType::ofTensors(), false);
}

c10::intrusive_ptr<c10::ivalue::Future> SageWork::getFutureResult() {
  return future_in(code_future_, c10::IntType::get(), true);
}

void OpWork::add(const RustGroup& group, Plan& plan, std::vector<at::Tensor> keep) {
  auto pending = std::make_shared<Pending>(c10::intrusive_ptr<OpWork>::reclaim_copy(this), std::move(keep), plan);
  ++parts_;
  try {
    ops_.push_back(plan.issue(group, std::move(pending)));
  } catch (...) {
    --parts_;
    throw;
  }
}

void OpWork::part_ended(const std::string& error) {
  if (!error.empty()) note_failure(error);
  if (--parts_ > 0) return;
  std::string failure;
  if (failed_) {
    std::lock_guard<std::mutex> lock(mutex_);
    failure = part_error_;
  }
  finish(failure);
}

void OpWork::note_failure(const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (part_error_.empty()) part_error_ = error;
  failed_ = true;
}

bool OpWork::done() const {
  return std::all_of(ops_.begin(), ops_.end(), [](const rust::Box<RustOp>& op) { return op->is_done(); });
}

std::string OpWork::error() const {
  for (const auto& op : ops_) {
    const rust::String text = op->facts().error;
    if (!text.empty()) return std::string(text);
  }
  if (!failed_) return {};
  std::lock_guard<std::mutex> lock(const_cast<OpWork*>(this)->mutex_);
  return part_error_;
}

bool OpWork::wait(std::chrono::milliseconds timeout) {
  if (!done()) CallbackPool::about_to_block();
  // No timeout, or c10d's "unset", means the operation's own deadline, which the core keeps.
  const bool bounded = timeout.count() > 0;
  const auto until = std::chrono::steady_clock::now() + timeout;
  for (const auto& op : ops_) {
    int64_t left = -1;
    if (bounded) {
      const auto rest = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
      left = std::max<int64_t>(rest.count(), 0);
    }
    checked([&] { op->wait(left); });
  }
  if (failed_) raise_coded(error());
  Graveyard::instance().drain();
  return true;
}

void OpWork::abort() {
  for (const auto& op : ops_) op->cancel();
}

int OpWork::sourceRank() const {
  if (opType_ == c10d::OpType::RECV || opType_ == c10d::OpType::RECVANYSOURCE) return ops_.front()->facts().source;
  return SageWork::sourceRank();
}

uint64_t OpWork::getSequencenumber() const {
  return ops_.front()->facts().number;
}

std::vector<Explanation> OpWork::explain() const {
  std::vector<Explanation> found;
  for (const auto& op : ops_) found.push_back(op->explain());
  return found;
}

std::chrono::milliseconds OpWork::timeout() const {
  return std::chrono::milliseconds(static_cast<int64_t>(ops_.front()->facts().timeout_ms));
}

std::chrono::nanoseconds OpWork::duration() const {
  uint64_t longest = 0;
  for (const auto& op : ops_) longest = std::max(longest, op->facts().duration_ns);
  return std::chrono::nanoseconds(longest);
}

TaskWork::TaskWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
                   std::unique_ptr<Trace> trace, uint64_t number, std::chrono::milliseconds timeout)
    : SageWork(rank, type, std::move(outputs), std::move(events), std::move(trace)),
      number_(number),
      timeout_(timeout) {}

void TaskWork::end(std::exception_ptr failure) {
  const std::string text = failure ? coded_text(failure) : std::string();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_at_ = std::chrono::steady_clock::now();
    exception_ = std::move(failure);
    text_ = text;
    completed_ = true;
  }
  cv_.notify_all();
  finish(text);
}

bool TaskWork::done() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_;
}

std::string TaskWork::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return text_;
}

std::exception_ptr TaskWork::exception() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return exception_;
}

std::chrono::nanoseconds TaskWork::duration() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return ended_at_ - began_;
}

bool TaskWork::wait(std::chrono::milliseconds timeout) {
  sleep_until_completed(timeout);
  Graveyard::instance().drain();
  return true;
}

Pending::Pending(c10::intrusive_ptr<OpWork> work, std::vector<at::Tensor> keep, Plan& plan)
    : work_(std::move(work)),
      keep_(std::move(keep)),
      before_(std::move(plan.before)),
      after_(std::move(plan.after)),
      late_(std::move(plan.late)) {}

void Pending::copy(bool back) const {
  if (back) return copy(after_, false);
  if (late_) guarded("from a device", late_);
  copy(before_, true);
}

void Pending::copy(const std::vector<Staged>& list, bool into_temporaries) const {
  guarded("of a strided tensor", [&] {
    for (const Staged& staged : list) {
      if (into_temporaries) {
        copy_quietly(staged.temporary, staged.tensor);
      } else {
        copy_quietly(staged.tensor, staged.temporary);
      }
    }
  });
}

void Pending::guarded(const char* what, const std::function<void()>& copies) const {
  try {
    copies();
  } catch (const std::exception& error) {
    copy_error_ = coded(ErrorKind::kBug, c10::str("sagellm: a copy ", what, " failed: ", error.what()));
    if (work_) work_->note_failure(copy_error_);
  }
}

void Pending::ended(rust::Str error) const {
  for (auto* list : {&before_, &after_}) {
    for (Staged& staged : *list) keep_.push_back(std::move(staged.tensor));
    list->clear();
  }
  c10::intrusive_ptr<OpWork> work = std::move(work_);
  if (work) work->part_ended(std::string(error));
  // Moved, not copied: a reference left on this thread could be the last.
  if (work || !keep_.empty()) Graveyard::instance().bury(std::move(work), std::move(keep_));
}

}  // namespace sagellm
