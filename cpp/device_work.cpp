#include "device_work.hpp"

#include <ATen/core/jit_type.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <pthread.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "callbacks.hpp"
#include "errors.hpp"
#include "python_host.hpp"

namespace sagellm {

DeviceWork::DeviceWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
                       std::unique_ptr<Trace> trace, Launched launched)
    : SageWork(rank, type, std::move(outputs), std::move(events), std::move(trace)), launched_(std::move(launched)) {
  devices_ = {launched_.stream.device()};
}

void DeviceWork::watch() {
  DeviceWatch::instance().add(c10::intrusive_ptr<DeviceWork>::reclaim_copy(this));
}

void DeviceWork::fail(const std::string& error, bool idle) {
  end(error, idle);
}

bool DeviceWork::poll() {
  if (done()) return true;
  const c10::DeviceGuard guard(launched_.stream.device());
  const auto query = [&] { return launched_.ended->query(); };
  const bool passed = launched_.guardian ? launched_.guardian->ask(launched_.stream.device_index(), query) : query();
  std::string trouble;
  if (launched_.guardian) {
    // Asked even when the stream has passed it: some libraries tell of a failure only then.
    trouble = launched_.guardian->look(launched_.watched, passed);
  }
  if (!passed && trouble.empty()) return false;
  end(trouble, passed);
  return true;
}

void DeviceWork::abort() {
  end(c10::str("Asagellm: ", launched_.watched.what, " was aborted"), false);
}

void DeviceWork::end(const std::string& error, bool idle) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (completed_) return;
    completed_ = true;
    text_ = error;
    ended_at_ = std::chrono::steady_clock::now();
  }
  cv_.notify_all();
  if (launched_.told) launched_.told(error.empty());
  finish(error);
  std::vector<at::Tensor> tensors = std::move(launched_.keep);
  if (!idle) {
    // The device may still use them, and nobody knows until when.
    new std::vector<at::Tensor>(std::move(tensors));
    new std::shared_ptr<void>(std::move(launched_.also));
    return;
  }
  Graveyard::instance().bury(c10::intrusive_ptr<DeviceWork>::reclaim_copy(this), std::move(tensors));
}

bool DeviceWork::done() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_;
}

std::string DeviceWork::error() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return text_;
}

std::chrono::nanoseconds DeviceWork::duration() const {
  if (launched_.begun) {
    const std::chrono::duration<double, std::milli> took(launched_.begun->elapsedTime(*launched_.ended));
    return std::chrono::duration_cast<std::chrono::nanoseconds>(took);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return ended_at_ - began_;
}

float DeviceWork::getDuration() const {
  if (!launched_.begun) {
    raise("Bsagellm: durations are measured only for works that were issued after enable_collectives_timing()");
  }
  return SageWork::getDuration();
}

void DeviceWork::order() const {
  const c10::DeviceGuard guard(launched_.stream.device());
  launched_.ended->block(current_stream(launched_.stream.device()));
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  const bool bounded = timeout.count() > 0;
  if (bounded || launched_.blocks_host) {
    constexpr auto kSlice = std::chrono::milliseconds(100);
    const auto until = std::chrono::steady_clock::now() + timeout;
    auto pause = std::chrono::microseconds(20);
    while (!poll()) {
      if (check_interrupt()) std::rethrow_exception(take_interrupt());
      if (bounded && std::chrono::steady_clock::now() >= until) {
        raise(c10::str("Tsagellm ", c10d::opTypeToString(opType_), ": wait(", timeout.count(),
                       " ms) elapsed; the operation goes on"));
      }
      std::unique_lock<std::mutex> lock(mutex_);
      cv_.wait_for(lock, pause, [this] { return completed_; });
      pause = std::min(pause * 2, std::chrono::duration_cast<std::chrono::microseconds>(kSlice) / 100);
    }
  }
  const std::string text = error();
  if (!text.empty()) raise(text);
  order();
  Graveyard::instance().drain();
  return true;
}

void DeviceWork::on_result_stream(const std::function<void()>& body) const {
  const c10::DeviceGuard guard(launched_.stream.device());
  const c10::StreamGuard on(launched_.stream);
  body();
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (value_) return value_;
  value_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices_);
  const auto future = value_;
  const std::string text = text_;
  lock.unlock();
  // It has no callback yet, so this runs none.
  if (text.empty()) {
    on_result_stream([&] { future->markCompleted(c10::IValue(outputs_)); });
  } else {
    future->setError(to_exception(text));
  }
  return future;
}

void DeviceWatch::add(c10::intrusive_ptr<DeviceWork> work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  works_.push_back(std::move(work));
  if (!running_ && !stopped_) {
    const BlockSignals block;
    std::thread([this] { serve(); }).detach();
    running_ = true;
  }
  changed_.notify_all();
}

void DeviceWatch::serve() {
  pthread_setname_np(pthread_self(), "sagellm-device");
  constexpr auto kShort = std::chrono::microseconds(100);
  constexpr auto kLong = std::chrono::microseconds(5000);
  constexpr auto kIdle = std::chrono::seconds(10);
  auto pause = kShort;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    if (works_.empty()) {
      if (!changed_.wait_for(lock, kIdle, [this] { return stopped_ || !works_.empty(); })) break;
      pause = kShort;
      continue;
    }
    std::deque<c10::intrusive_ptr<DeviceWork>> asked;
    asked.swap(works_);
    lock.unlock();
    const size_t before = asked.size();
    const auto last = std::remove_if(asked.begin(), asked.end(), [](const auto& work) {
      try {
        return work->poll();
      } catch (const std::exception& error) {
        work->fail(std::string("Dsagellm: the device was asked for the end of an operation: ") + error.what(), false);
        return true;
      }
    });
    asked.erase(last, asked.end());
    pause = asked.size() < before ? kShort : std::min(pause * 2, kLong);
    lock.lock();
    // Those added meanwhile come behind.
    works_.insert(works_.begin(), std::make_move_iterator(asked.begin()), std::make_move_iterator(asked.end()));
    if (!works_.empty()) changed_.wait_for(lock, pause, [this] { return stopped_; });
  }
  running_ = false;
  changed_.notify_all();
}

void DeviceWatch::stop(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, patience, [this] { return !running_; });
  new std::deque<c10::intrusive_ptr<DeviceWork>>(std::move(works_));
  works_.clear();
}

}  // namespace sagellm
