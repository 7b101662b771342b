#include "device/work.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <thread>
#include <utility>

#include "host/errors.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

void DeviceCall::launch(const std::vector<DevicePlaced>& placed, size_t stream) const {
  checked([&] { core_->launch({placed.data(), placed.size()}, stream); });
}

void DeviceCall::failed_here(const std::string& why) const {
  core_->failed_here(why);
}

DeviceCall::State DeviceCall::poll(const std::function<bool()>& has_passed) const {
  const uint32_t mode = checked([&] { return core_->before_poll(); });
  bool passed = false;
  try {
    passed = has_passed();
  } catch (const std::exception&) {
    const DevicePolled polled = core_->poll(DeviceSays::kRunning, mode);
    if (polled.error.empty()) throw;
    return {false, std::string(polled.error)};
  }
  const DevicePolled polled = core_->poll(passed ? DeviceSays::kPassed : DeviceSays::kRunning, mode);
  return {passed && !polled.undecided, std::string(polled.error)};
}

std::vector<Explanation> DeviceCall::explain() const {
  const rust::Vec<Explanation> found = core_->explain();
  return {found.begin(), found.end()};
}

DeviceWork::DeviceWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
                       std::unique_ptr<Trace> trace, Launched launched)
    : SageWork(rank, type, std::move(outputs), std::move(events), std::move(trace), launched.known),
      launched_(std::move(launched)) {
  devices_ = {launched_.stream.device()};
  value_at_issue_ = true;
}

void DeviceWork::watch() {
  DeviceWatch::instance().add(c10::intrusive_ptr<DeviceWork>::reclaim_copy(this));
}

bool DeviceWork::overdue() const {
  return known_.timeout.count() > 0 && std::chrono::steady_clock::now() - began_ > known_.timeout;
}

bool DeviceWork::has_passed() const {
  return launched_.ended->query() && std::all_of(launched_.earlier.begin(), launched_.earlier.end(),
                                                 [](const auto& event) { return event->query(); });
}

bool DeviceWork::poll(std::chrono::microseconds spin) {
  if (has_ended()) return true;
  const c10::DeviceGuard guard(launched_.stream.device());
  const auto query = [&] {
    const auto until = std::chrono::steady_clock::now() + spin;
    bool passed = has_passed();
    while (!passed && spin.count() > 0 && std::chrono::steady_clock::now() < until) passed = has_passed();
    return passed;
  };
  const DeviceCall::State state = launched_.call->poll(query);
  if (!state.passed && state.error.empty()) return false;
  if (state.error.empty()) {
    end_on_device({}, true);
  } else {
    fail(state.error, state.passed);
  }
  return true;
}

void DeviceWork::fail(const std::string& error, bool idle) {
  const auto failure = launched_.failure;
  Failure::Threads threads;
  if (failure) threads = failure->threads();
  // First, so that a thread that waits for it gets the error there.
  end_on_device(error, idle);
  const auto abort = [call = launched_.call] { call->abort(); };
  failure ? failure->follow(error, std::move(threads), abort) : abort();
}

void DeviceWork::fail(const std::exception_ptr& failure) {
  const std::string why = "the device was asked for its end: " + coded_text(failure).substr(1);
  launched_.call->failed_here(why);
  fail(coded(ErrorKind::kRankFailed, "sagellm: " + why));
}

void DeviceWork::end_on_device(const std::string& error, bool idle) {
  if (!end(error)) return;
  if (launched_.failure && launched_.issuer != 0) launched_.failure->ended(launched_.issuer);
  std::vector<at::Tensor> tensors = std::move(launched_.keep);
  if (!idle) {
    // The device may still use them, and no event says until when, so they are leaked.
    new std::vector<at::Tensor>(std::move(tensors));
    new std::shared_ptr<DeviceCall>(launched_.call);
    return;
  }
  if (!tensors.empty()) DeferredRelease::instance().add(nullptr, std::move(tensors));
}

std::chrono::nanoseconds DeviceWork::duration() const {
  if (!launched_.begun) return SageWork::duration();
  const std::chrono::duration<double, std::milli> took(launched_.begun->elapsedTime(*launched_.ended));
  return std::chrono::duration_cast<std::chrono::nanoseconds>(took);
}

void DeviceWork::order() const {
  const c10::Stream callers = current_stream(launched_.stream.device());
  // Work on the same stream is in order already.
  if (callers == launched_.stream) return;
  const c10::DeviceGuard guard(launched_.stream.device());
  launched_.ended->block(callers);
}

void DeviceWork::wait_for_end(const WaitLimit& limit) {
  if (!limit.bounded() && !launched_.blocks_host) return;
  // Going to sleep and waking cost more than a short operation takes.
  constexpr auto kSpin = std::chrono::microseconds(100);
  constexpr auto kLongest = std::chrono::microseconds(1000);
  auto pause = std::chrono::microseconds(20);
  for (bool ended = poll(kSpin); !ended; ended = poll()) {
    check_caller(limit);
    sleep(pause, limit);
    pause = std::min(pause * 2, kLongest);
  }
}

void DeviceWork::on_result_stream(const std::function<void()>& body) const {
  const c10::DeviceGuard guard(launched_.stream.device());
  const c10::StreamGuard on(launched_.stream);
  body();
}

void DeviceWatch::add(WorkPtr work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  added_.push_back(std::move(work));
  if (stopped_) return;
  if (!running_) {
    const BlockSignals block;
    std::thread([this] { serve(); }).detach();
    running_ = true;
  } else if (idle_) {
    changed_.notify_all();
  }
}

void DeviceWatch::serve() {
  pthread_setname_np(pthread_self(), "sagellm-device");
  constexpr auto kShort = std::chrono::microseconds(100);
  constexpr auto kLong = std::chrono::microseconds(5000);
  constexpr auto kIdle = std::chrono::seconds(10);
  auto pause = kShort;
  // Leaked, with the works that have not ended, when the process ends.
  auto& works = *new std::vector<WorkPtr>();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    if (added_.empty() && works.empty()) {
      idle_ = true;
      const bool called = changed_.wait_for(lock, kIdle, [this] { return stopped_ || !added_.empty(); });
      idle_ = false;
      if (!called) break;
      pause = kShort;
      continue;
    }
    std::move(added_.begin(), added_.end(), std::back_inserter(works));
    added_.clear();
    lock.unlock();
    pause = look(works) ? kShort : std::min(pause * 2, kLong);
    lock.lock();
    if (!works.empty()) changed_.wait_for(lock, pause, [this] { return stopped_; });
  }
  if (works.empty()) delete &works;
  running_ = false;
  changed_.notify_all();
}

bool DeviceWatch::look(std::vector<WorkPtr>& works) {
  const auto has_ended = [](DeviceWork& work) {
    try {
      return work.poll();
    } catch (const std::exception&) {
      work.fail(std::current_exception());
      return true;
    }
  };
  std::vector<c10::Stream> busy;
  std::vector<WorkPtr> left;
  for (WorkPtr& work : works) {
    const bool behind_another = std::find(busy.begin(), busy.end(), work->stream()) != busy.end();
    if ((!behind_another || work->overdue()) && has_ended(*work)) {
      DeferredRelease::instance().add(std::move(work), {});
      continue;
    }
    if (!behind_another) busy.push_back(work->stream());
    left.push_back(std::move(work));
  }
  works.swap(left);
  return works.size() < left.size();
}

void DeviceWatch::stop(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, patience, [this] { return !running_; });
  new std::vector<WorkPtr>(std::move(added_));
  added_.clear();
}

}  // namespace sagellm
