#include "device/watch.hpp"

#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <thread>

#include "host/errors.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

void DeviceWatch::add(const RunPtr& run) {
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    start();
    added_.push_back(run);
  } catch (const std::exception&) {
    run->end(coded_text(std::current_exception()), false);
    throw;
  }
}

void DeviceWatch::begin(const Launch& launch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  start();
  launching_.push_back(launch);
}

void DeviceWatch::end(const CallPtr& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto is_it = [&](const Launch& launch) { return launch.call == call; };
  const auto found = std::find_if(launching_.begin(), launching_.end(), is_it);
  if (found != launching_.end()) launching_.erase(found);
}

bool DeviceWatch::ends(const Launch& launch) {
  const std::string error(launch.call->look_at_launch());
  if (error.empty()) return false;
  // Usually the launch throws the error when it returns, and then takes back the exception that is raised here. If the
  // launch has just succeeded, this exception is the only way for its thread to learn of the failure.
  Failure::Threads threads = launch.failure->threads();
  threads.push_back(launch.thread);
  launch.failure->follow(error, std::move(threads), [call = launch.call] { call->abort(); }, true);
  return true;
}

void DeviceWatch::add_captured(const CallPtr& call, std::shared_ptr<Failure> failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  start();
  captured_.push_back({call, std::move(failure)});
}

void DeviceWatch::look_at_replays(std::vector<Captured>& captured) {
  std::vector<Captured> left;
  for (Captured& each : captured) {
    const auto call = each.call.lock();
    if (!call) continue;
    const std::string error(call->look_at_replays());
    if (error.empty()) {
      left.push_back(std::move(each));
    } else {
      each.failure->follow(error, each.failure->threads(), [call] { call->abort(); });
    }
  }
  captured.swap(left);
}

void DeviceWatch::start() {
  if (stopped_) return;
  if (C10_UNLIKELY(!running_ || !guarding_)) {
    const BlockSignals block;
    if (!running_) std::thread([this] { serve(); }).detach();
    running_ = true;
    if (!guarding_) std::thread([this] { guard(); }).detach();
    guarding_ = true;
  }
  if (idle_) changed_.notify_all();
}

void DeviceWatch::serve() {
  pthread_setname_np(pthread_self(), "sagellm-device");
  constexpr auto kShort = std::chrono::microseconds(100);
  constexpr auto kLong = std::chrono::microseconds(5000);
  constexpr auto kIdle = std::chrono::seconds(10);
  constexpr auto kReplays = std::chrono::seconds(1);
  // Number of pauses for which the thread stays awake after the last call. So a program that makes one call after the
  // other does not pay for a wake-up in each call.
  constexpr int kAwake = 10;
  int without_calls = 0;
  auto pause = kShort;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    if (!captured_.empty() && std::chrono::steady_clock::now() - looked_ >= kReplays) {
      std::vector<Captured> captured = std::exchange(captured_, {});
      lock.unlock();
      look_at_replays(captured);
      lock.lock();
      std::move(captured.begin(), captured.end(), std::back_inserter(captured_));
      looked_ = std::chrono::steady_clock::now();
    }
    const bool none = added_.empty() && runs_.empty() && launching_.empty();
    without_calls = none ? without_calls + 1 : 0;
    if (without_calls > kAwake) {
      idle_ = true;
      // Wake early if references wait to be released.
      std::chrono::milliseconds rest = captured_.empty() ? kIdle : kReplays;
      if (!DeferredRelease::instance().empty()) rest = DeferredRelease::kPatience;
      // The first captured call ends the sleep, because from then on the thread looks once a second.
      const bool none_captured = captured_.empty();
      const bool called = changed_.wait_for(lock, rest, [&] {
        return stopped_ || !added_.empty() || !launching_.empty() || (none_captured && !captured_.empty());
      });
      idle_ = false;
      DeferredRelease::instance().post();
      if (!called && rest == kIdle) break;
      pause = kShort;
      without_calls = 0;
      continue;
    }
    std::move(added_.begin(), added_.end(), std::back_inserter(runs_));
    added_.clear();
    auto launching = launching_;
    lock.unlock();
    // This comes first, because `look` queries the device, and such a query may not return before the launch has ended.
    end_overdue(launching);
    pause = look() || none ? kShort : std::min(pause * 2, kLong);
    DeferredRelease::instance().post();
    lock.lock();
    changed_.wait_for(lock, pause, [this] { return stopped_; });
  }
  running_ = false;
  changed_.notify_all();
  ending_.notify_all();
}

void DeviceWatch::end_overdue(std::vector<Launch>& launching) {
  for (const Launch& launch : launching) {
    // A launch that has failed need not be checked again.
    if (ends(launch)) end(launch.call);
  }
  launching.clear();
}

void DeviceWatch::guard() {
  pthread_setname_np(pthread_self(), "sagellm-overdue");
  constexpr auto kPause = std::chrono::milliseconds(500);
  std::unique_lock<std::mutex> lock(mutex_);
  uint64_t found = 0;
  while (running_ && !stopped_) {
    ending_.wait_for(lock, kPause, [this] { return !running_ || stopped_; });
    const uint64_t before = std::exchange(found, queries_.load(std::memory_order_relaxed));
    if (found % 2 == 0 || found != before) continue;
    std::vector<RunPtr> runs = runs_;
    auto launching = launching_;
    lock.unlock();
    end_overdue(launching);
    for (RunPtr& run : runs) {
      run->fail_unasked();
      DeferredRelease::instance().add(nullptr, {}, std::move(run));
    }
    lock.lock();
  }
  guarding_ = false;
}

bool DeviceWatch::look() {
  if (runs_.empty()) return false;
  const auto has_ended = [](DeviceRun& run) {
    try {
      return run.poll();
    } catch (const std::exception&) {
      run.fail(std::current_exception());
      return true;
    }
  };
  std::vector<c10::Stream> busy;
  std::vector<RunPtr> left;
  std::vector<RunPtr> ended;
  queries_.fetch_add(1, std::memory_order_relaxed);
  for (const RunPtr& run : runs_) {
    const bool behind_another = std::find(busy.begin(), busy.end(), run->stream()) != busy.end();
    if ((!behind_another || run->overdue()) && has_ended(*run)) {
      ended.push_back(run);
      continue;
    }
    if (!behind_another) busy.push_back(run->stream());
    left.push_back(run);
  }
  queries_.fetch_add(1, std::memory_order_relaxed);
  if (ended.empty()) return false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    runs_.swap(left);
  }
  left.clear();
  // This thread must not drop the last reference to a call.
  for (RunPtr& run : ended) DeferredRelease::instance().add(nullptr, {}, std::move(run));
  return true;
}

void DeviceWatch::stop(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
  ending_.notify_all();
  changed_.wait_for(lock, patience, [this] { return !running_; });
  new std::vector<RunPtr>(std::move(added_));
  added_.clear();
}

}  // namespace sagellm
