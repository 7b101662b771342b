#include "work/work.hpp"

#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>

#include "host/python_host.hpp"
#include "work/callbacks.hpp"
#include "work/steps.hpp"

namespace sagellm {

namespace {

uint64_t next_key() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

c10d::WorkResult result_code(const std::string& error) {
  if (error.empty()) return c10d::WorkResult::SUCCESS;
  return kind_of(error) == ErrorKind::kTimeout ? c10d::WorkResult::TIMEOUT : c10d::WorkResult::COMM_ERROR;
}

}  // namespace

SageWork::SageWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
                   std::unique_ptr<Trace> trace, std::optional<Known> known)
    : Work(rank, type),
      events_(std::move(events)),
      trace_(std::move(trace)),
      timed_(events_->timing()),
      expected_(events_->has_work_hook()),
      key_(next_key()),
      outputs_(std::move(outputs)),
      known_(known.value_or(Known())),
      began_(known || expected_ ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point()) {
  if (!outputs_.empty() && !outputs_[0].is_cpu()) devices_ = {outputs_[0].device()};
  if (expected_) events_->expect_work();
}

// ------------------------------------------------------------------------------------------------ the end

void SageWork::add(const RustGroup& group, Plan& plan, std::vector<at::Tensor> keep) {
  auto pending = std::make_shared<Pending>(c10::intrusive_ptr<SageWork>::reclaim_copy(this), std::move(keep), plan);
  ++parts_;
  try {
    ops_.push_back(plan.issue(group, std::move(pending)));
  } catch (...) {
    --parts_;
    throw;
  }
}

void SageWork::note_failure(const std::string& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_.empty()) error_ = error;
  failed_ = true;
}

void SageWork::part_ended(const std::string& error) {
  if (!error.empty()) note_failure(error);
  if (--parts_ == 0) end(std::string());
}

bool SageWork::end(const std::string& error, const std::exception_ptr& failure) {
  FuturePtr future;
  FuturePtr code_future;
  std::shared_ptr<void> held;
  size_t queue = 0;
  std::string how;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (completed_) return false;
    completed_ = true;
    if (!told_by_core()) ended_at_ = std::chrono::steady_clock::now();
    exception_ = failure;
    if (error_.empty()) error_ = error;
    failed_ = !error_.empty();
    how = error_;
    if (!value_at_issue_) future = future_;
    code_future = code_future_;
    held = std::move(held_in_step_);
    queue = queue_;
  }
  cv_.notify_all();
  if (trace_) trace_->end();
  if (future || code_future) {
    auto self = c10::intrusive_ptr<SageWork>::reclaim_copy(this);
    CallbackPool::instance().post(
        [self, future, code_future, held = std::move(held)] {
          if (code_future) self->complete(*code_future, true);
          if (future) self->complete(*future, false);
        },
        queue);
  }
  tell_hooks(how);
  return true;
}

void SageWork::tell_hooks(const std::string& error) {
  events_->tell_failure(error);
  if (error.empty() && events_->has_completion_hooks()) {
    CompletionHookArgs args;
    args.completionKey = key_;
    if (timed_) args.duration_ms = std::chrono::duration<float, std::milli>(duration()).count();
    events_->call_completion_hooks(args);
  }
  if (!expected_) return;
  std::shared_ptr<c10d::WorkInfo> info;
  if (error.empty()) {
    const auto finished = began_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(duration());
    info = std::make_shared<c10d::WorkInfo>(opType_, getSequencenumber(), began_, finished, duration());
  }
  events_->work_ended(std::move(info));
}

void SageWork::release_resources() {
  outputs_.clear();
  future_.reset();
  code_future_.reset();
}

// ------------------------------------------------------------------------------------------------ who waits

template <class Body>
void SageWork::telling(const Body& body) const {
  try {
    body();
  } catch (const c10::DistBackendError&) {
    // If only this caller's timeout has passed, the Work has not ended, and this error is not the group's failure.
    if (has_ended()) events_->told();
    throw;
  }
}

bool SageWork::wait(std::chrono::milliseconds timeout) {
  const InCall in_call;
  telling([&] {
    wait_for_end(WaitLimit(timeout));
    if (failed_) std::rethrow_exception(exception());
  });
  order();
  DeferredRelease::instance().release();
  return true;
}

void SageWork::wait_for_end(const WaitLimit& limit) {
  if (!has_ended()) CallbackPool::about_to_block();
  if (told_by_core()) return wait_for_core(limit);
  if (events_->inherited()) raise(ErrorKind::kInvalid, kInherited);
  // The wait checks Python's signals this often. The job ends by the deadlines of its operations.
  while (!sleep(std::chrono::milliseconds(100), limit)) check_caller(limit);
}

void SageWork::wait_for_core(const WaitLimit& limit) const {
  for (const auto& op : ops_) checked([&] { op->wait(limit.bounded() ? limit.left().count() : -1); });
}

bool SageWork::sleep(std::chrono::microseconds slice, const WaitLimit& limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return cv_.wait_until(lock, std::min(WaitLimit::Clock::now() + slice, limit.until), [this] { return completed_; });
}

void SageWork::check_caller(const WaitLimit& limit) const {
  if (check_interrupt()) std::rethrow_exception(take_interrupt());
  if (limit.passed()) {
    raise(ErrorKind::kTimeout, c10::str("sagellm ", c10d::opTypeToString(opType_), ": wait(", limit.given.count(),
                                        " ms) elapsed; the operation goes on"));
  }
}

// ------------------------------------------------------------------------------------------------ who asks

bool SageWork::core_ended() const {
  return std::all_of(ops_.begin(), ops_.end(), [](const rust::Box<RustOp>& op) { return op->facts().done; });
}

bool SageWork::has_ended() const {
  if (told_by_core()) return core_ended();
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_;
}

std::string SageWork::error() const {
  // Read from the core itself, which may not have reported the error to this Work yet.
  for (const auto& op : ops_) {
    const rust::String text = op->facts().error;
    if (!text.empty()) return std::string(text);
  }
  if (!failed_) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

std::exception_ptr SageWork::exception() const {
  if (!has_ended()) return nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (exception_) return exception_;
  }
  const std::string text = error();
  return text.empty() ? nullptr : to_exception(text);
}

int SageWork::sourceRank() const {
  const bool receive = opType_ == c10d::OpType::RECV || opType_ == c10d::OpType::RECVANYSOURCE;
  if (receive && !ops_.empty()) return ops_.front()->facts().source;
  raise(ErrorKind::kBug,
        c10::str("sagellm: source_rank() was asked of ", c10d::opTypeToString(opType_), ", expected a receive"));
}

uint64_t SageWork::getSequencenumber() const {
  return ops_.empty() ? known_.number : ops_.front()->facts().number;
}

#ifdef SAGELLM_HAS_WORK_TIMEOUT
std::chrono::milliseconds SageWork::getTimeout() const {
  if (ops_.empty()) return known_.timeout;
  return std::chrono::milliseconds(static_cast<int64_t>(ops_.front()->facts().timeout_ms));
}
#endif

std::chrono::nanoseconds SageWork::duration() const {
  if (!told_by_core()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ended_at_ - began_;
  }
  uint64_t longest = 0;
  for (const auto& op : ops_) longest = std::max(longest, op->facts().duration_ns);
  return std::chrono::nanoseconds(longest);
}

float SageWork::getDuration() const {
  if (!timed_) {
    raise(ErrorKind::kBug,
          "sagellm: durations are measured only for works that were issued after enable_collectives_timing()");
  }
  if (!has_ended()) raise(ErrorKind::kBug, "sagellm: the duration is known only after the work has completed");
  return std::chrono::duration<float, std::milli>(duration()).count();
}

std::vector<rust::String> SageWork::explain() const {
  std::vector<rust::String> found;
  for (const auto& op : ops_) found.push_back(op->explain());
  return found;
}

// ------------------------------------------------------------------------------------------------ futures

void SageWork::complete(c10::ivalue::Future& future, bool with_code) const {
  const std::string how = error();
  if (with_code) {
    future.markCompleted(c10::IValue(static_cast<int64_t>(result_code(how))));
  } else if (how.empty()) {
    on_result_stream([&] { future.markCompleted(c10::IValue(outputs_)); });
  } else {
    future.setError(events_->told_where_raised(exception()));
  }
}

SageWork::FuturePtr SageWork::future_in(FuturePtr& slot, const c10::TypePtr& type, bool with_code) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(type, with_code ? std::vector<c10::Device>() : devices_);
  bool complete_here = false;
  if (events_->inherited()) {
    // A thread of the parent may have held the mutex at the fork.
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    complete_here = lock.owns_lock() && completed_;
    if (!complete_here) future->setError(to_exception(coded(ErrorKind::kInvalid, kInherited)));
  } else {
    const std::lock_guard<std::mutex> lock(mutex_);
    // A callback that has requested one of the two futures may be waiting for it, so a later request does not change
    // the queue back.
    if (const size_t queue = CallbackPool::queue_of_futures(); queue != 0 || (!future_ && !code_future_))
      queue_ = queue;
    if (slot) return slot;
    slot = future;
    complete_here = completed_ || (value_at_issue_ && !with_code);
    if (!complete_here && !held_in_step_) held_in_step_ = StepMeter::holds_future();
  }
  // The future has no callback yet, so none runs here.
  if (complete_here) {
    complete(*future, with_code);
  } else if (!future->completed()) {
    keep_until_end();
  }
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> SageWork::getFuture() {
  // The error is thrown here and not by the future. A wait on the future does not call `Events::told`, so this thread
  // would get the error a second time.
  if (value_at_issue_ && failed_ && !events_->inherited()) telling([&] { std::rethrow_exception(exception()); });
  return future_in(future_, c10::ListType::ofTensors(), false);
}

c10::intrusive_ptr<c10::ivalue::Future> SageWork::getFutureResult() {
  return future_in(code_future_, c10::IntType::get(), true);
}

// ------------------------------------------------------------------------------------------------ for the core

Pending::Pending(c10::intrusive_ptr<SageWork> work, std::vector<at::Tensor> keep, Plan& plan)
    : work_(std::move(work)),
      keep_(std::move(keep)),
      before_(std::move(plan.before)),
      after_(std::move(plan.after)),
      prepare_(std::move(plan.prepare)),
      copies_on_(plan.copies_on) {}

void Pending::copy(bool back) const {
  try {
    const c10::OptionalStreamGuard on(copies_on_);
    if (!back && prepare_) prepare_();
    copy_staged(back ? after_ : before_, back);
  } catch (const std::exception& error) {
    const char* const what = copies_on_ ? "between a device and host memory" : "of a strided tensor";
    const ErrorKind kind = copies_on_ ? ErrorKind::kSystem : ErrorKind::kBug;
    copy_error_ = coded(kind, c10::str("sagellm: a copy ", what, " failed: ", error.what()));
    if (work_) work_->note_failure(copy_error_);
  }
}

void Pending::ended(rust::Str error) const {
  for (auto* list : {&before_, &after_}) {
    for (Staged& staged : *list) keep_.push_back(std::move(staged.tensor));
    list->clear();
  }
  c10::intrusive_ptr<SageWork> work = std::move(work_);
  if (work) work->part_ended(std::string(error));
  // Moved, not copied, because a reference left on this thread could be the last one.
  if (work || !keep_.empty()) DeferredRelease::instance().add(std::move(work), std::move(keep_));
}

c10::intrusive_ptr<c10d::Work> in_background(c10::intrusive_ptr<SageWork> work, bool async, std::function<void()> job) {
  CallbackPool::instance().post([work, job = std::move(job)] { work->end(failure_of(job)); },
                                CallbackPool::queue_of_futures());
  if (async) return work;
  work->wait(kNoTimeout);
  return nullptr;
}

void wait_quietly(const std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
  for (const auto& work : works) (void)failure_of([&] { work->wait(kNoTimeout); });
}

}  // namespace sagellm
