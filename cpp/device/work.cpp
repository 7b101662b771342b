#include "device/work.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "device/watch.hpp"
#include "host/errors.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

CallPtr shared_call(rust::Box<RustCall> call) {
  return {call.into_raw(), [](RustCall* raw) { (void)rust::Box<RustCall>::from_raw(raw); }};
}

void LastEnds::put(const c10::Stream& stream, EventPtr ended) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ends_.insert_or_assign(stream, std::move(ended));
}

void LastEnds::passed(const c10::Stream& stream, const EventPtr& ended) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto own = ends_.find(stream);
  if (own != ends_.end() && own->second == ended) ends_.erase(own);
}

std::unordered_map<c10::Stream, LastEnds::EventPtr> LastEnds::all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ends_;
}

// ------------------------------------------------------------------------------------------------ the call

DeviceRun::DeviceRun(Launched launched, std::shared_ptr<Events> events)
    : launched_(std::move(launched)), events_(std::move(events)), work_(c10::intrusive_ptr<SageWork>()) {}

void DeviceRun::set_work(const c10::intrusive_ptr<SageWork>& work) {
  work_ = c10::weak_intrusive_ptr<SageWork>(work);
}

void DeviceRun::hold(const c10::intrusive_ptr<SageWork>& work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // If the run has ended, the thread that ended it already holds the Work.
  if (!ended_) held_ = work;
}

bool DeviceRun::overdue() const {
  const auto timeout = launched_.known.timeout;
  return timeout.count() > 0 && std::chrono::steady_clock::now() - began_ > timeout;
}

bool DeviceRun::has_passed() const {
  return launched_.ended->query() && std::all_of(launched_.earlier.begin(), launched_.earlier.end(),
                                                 [](const auto& event) { return event->query(); });
}

bool DeviceRun::poll(std::chrono::microseconds spin) {
  if (ended_) return true;
  const c10::DeviceGuard guard(launched_.stream.device());
  const RustCall& call = *launched_.call;
  // Until the result is reported to the core, this thread's queries break no other thread's capture into a graph.
  const uint32_t capture_mode = checked([&] { return call.before_poll(); });
  bool passed = false;
  std::string error;
  try {
    const auto until = std::chrono::steady_clock::now() + spin;
    passed = has_passed();
    while (!passed && spin.count() > 0 && std::chrono::steady_clock::now() < until) passed = has_passed();
  } catch (const std::exception&) {
    error = std::string(call.poll_running(capture_mode));
    if (error.empty()) throw;
    fail(error);
    return true;
  }
  if (passed) {
    const DevicePassed found = call.poll_passed(capture_mode);
    passed = !found.undecided;
    error = std::string(found.error);
  } else {
    error = std::string(call.poll_running(capture_mode));
  }
  if (!error.empty()) {
    fail(error, passed);
    return true;
  }
  if (passed) end({}, true);
  return passed;
}

void DeviceRun::fail_unasked() {
  if (ended_) return;
  const std::string error(launched_.call->look_at_launch());
  if (!error.empty()) fail(error);
}

std::vector<at::Tensor> DeviceRun::take_tensors() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(launched_.keep, {});
}

void DeviceRun::let_go() {
  // Destroyed at the end of this function, without the lock.
  const std::vector<at::Tensor> tensors = take_tensors();
}

void DeviceRun::end(const std::string& error, bool idle) {
  c10::intrusive_ptr<SageWork> work;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_.exchange(true)) return;
    work = held_ ? std::move(held_) : work_.lock();
  }
  if (work) {
    static_cast<DeviceWork&>(*work).settle(error);
  } else {
    events_->tell_failure(error);
  }
  launched_.under_way.end();
  if (idle && launched_.last) launched_.last->passed(launched_.stream, launched_.ended);
  std::vector<at::Tensor> tensors = take_tensors();
  if (!idle) {
    // The device may still use the tensors, and no event says until when. So they are leaked, as is the call.
    new std::vector<at::Tensor>(std::exchange(tensors, {}));
    new CallPtr(launched_.call);
  }
  if (work || !tensors.empty()) DeferredRelease::instance().add(std::move(work), std::move(tensors));
}

void DeviceRun::fail(const std::string& error, bool idle) {
  const auto failure = launched_.failure;
  Failure::Threads threads;
  if (failure) threads = failure->threads();
  // `end` comes first, so that a thread that waits for this run gets the error from its wait.
  end(error, idle);
  const auto abort = [call = launched_.call] { call->abort(); };
  failure ? failure->follow(error, std::move(threads), abort) : abort();
}

void DeviceRun::fail(const std::exception_ptr& failure) {
  const std::string why = "the device was asked for its end: " + text_of(coded_text(failure));
  launched_.call->failed_here(why);
  fail(coded(ErrorKind::kRankFailed, "sagellm: " + why));
}

// ------------------------------------------------------------------------------------------------ its Work

DeviceWork::DeviceWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
                       std::unique_ptr<Trace> trace, Launched launched)
    : SageWork(rank, type, std::move(outputs), events, std::move(trace), launched.known),
      run_(std::make_shared<DeviceRun>(std::move(launched), std::move(events))) {
  devices_ = {run_->stream().device()};
  // A barrier's value must not complete at issue: the host also waits for a barrier, and the barrier's work is on
  // several streams.
  value_at_issue_ = type != c10d::OpType::BARRIER;
}

c10::intrusive_ptr<DeviceWork> DeviceWork::make(int rank, c10d::OpType type, std::vector<at::Tensor> outputs,
                                                std::shared_ptr<Events> events, std::unique_ptr<Trace> trace,
                                                Launched launched) {
  auto made = c10::make_intrusive<DeviceWork>(rank, type, std::move(outputs), std::move(events), std::move(trace),
                                              std::move(launched));
  made->run_->set_work(made);
  return made;
}

void DeviceWork::watch() {
  if (is_listened_to()) run_->hold(c10::intrusive_ptr<SageWork>::reclaim_copy(this));
  DeviceWatch::instance().add(run_);
}

std::vector<rust::String> DeviceWork::explain() const {
  const rust::Vec<rust::String> found = run_->launched().call->explain();
  return {found.begin(), found.end()};
}

void DeviceWork::release_resources() {
  SageWork::release_resources();
  run_.reset();
}

std::chrono::nanoseconds DeviceWork::duration() const {
  const auto& launched = run_->launched();
  if (!launched.begun) return SageWork::duration();
  const std::chrono::duration<double, std::milli> took(launched.begun->elapsedTime(*launched.ended));
  return std::chrono::duration_cast<std::chrono::nanoseconds>(took);
}

void DeviceWork::order() const {
  const auto& launched = run_->launched();
  const c10::Stream callers = current_stream(launched.stream.device());
  if (callers != launched.stream) {  // work on the same stream is in order already
    const c10::DeviceGuard guard(launched.stream.device());
    launched.ended->block(callers);
  }
  if (callers == launched.callers) run_->let_go();
}

void DeviceWork::keep_until_end() {
  run_->hold(c10::intrusive_ptr<SageWork>::reclaim_copy(this));
}

void DeviceWork::wait_for_end(const WaitLimit& limit) {
  if (!limit.bounded() && !run_->launched().blocks_host) return;
  // Spin first: to sleep and wake takes longer than a short operation.
  constexpr auto kSpin = std::chrono::microseconds(100);
  constexpr auto kLongest = std::chrono::microseconds(1000);
  auto pause = std::chrono::microseconds(20);
  if (has_ended()) return;
  // Another thread may detect that the run has ended, so loop until the Work has ended as well.
  for (run_->poll(kSpin); !has_ended(); run_->poll()) {
    check_caller(limit);
    sleep(pause, limit);
    pause = std::min(pause * 2, kLongest);
  }
}

void DeviceWork::on_result_stream(const std::function<void()>& body) const {
  const c10::DeviceGuard guard(run_->stream().device());
  const c10::StreamGuard on(run_->stream());
  body();
}

}  // namespace sagellm
