#include "device/work.hpp"

#include <ATen/core/jit_type.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <pthread.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "host/errors.hpp"
#include "host/python_host.hpp"
#include "work/callbacks.hpp"

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

bool DeviceWork::has_passed() const {
  return launched_.ended->query() && std::all_of(launched_.earlier.begin(), launched_.earlier.end(),
                                                 [](const auto& event) { return event->query(); });
}

bool DeviceWork::poll(std::chrono::microseconds spin) {
  if (done()) return true;
  const c10::DeviceGuard guard(launched_.stream.device());
  const auto query = [&] {
    const auto until = std::chrono::steady_clock::now() + spin;
    bool passed = has_passed();
    while (!passed && spin.count() > 0 && std::chrono::steady_clock::now() < until) passed = has_passed();
    return passed;
  };
  bool passed = false;
  const std::string trouble = launched_.call->poll(query, passed);
  if (!passed && trouble.empty()) return false;
  end(trouble, passed);
  return true;
}

void DeviceWork::abort() {
  const auto& watched = launched_.watched;
  end(coded(ErrorKind::kAborted, c10::str("sagellm: ", watched.op, " number ", watched.number, " was aborted")), false);
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
  launched_.call->ended(error.empty());
  finish(error);
  std::vector<at::Tensor> tensors = std::move(launched_.keep);
  if (!idle) {
    // The device may still use them, and nobody knows until when.
    new std::vector<at::Tensor>(std::move(tensors));
    new std::shared_ptr<DeviceCall>(launched_.call);
    return;
  }
  if (!tensors.empty()) DeferredRelease::instance().add(nullptr, std::move(tensors));
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
    raise(ErrorKind::kBug,
          "sagellm: durations are measured only for works that were issued after enable_collectives_timing()");
  }
  return SageWork::getDuration();
}

void DeviceWork::order() const {
  const c10::Stream callers = current_stream(launched_.stream.device());
  // It is behind itself.
  if (callers == launched_.stream) return;
  const c10::DeviceGuard guard(launched_.stream.device());
  launched_.ended->block(callers);
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  const bool bounded = timeout.count() > 0;
  if (bounded || launched_.blocks_host) {
    // Going to sleep and waking cost more than a short operation takes.
    constexpr auto kSpin = std::chrono::microseconds(100);
    constexpr auto kLongest = std::chrono::milliseconds(1);
    const auto until = std::chrono::steady_clock::now() + timeout;
    auto pause = std::chrono::microseconds(20);
    for (bool ended = poll(kSpin); !ended; ended = poll()) {
      if (check_interrupt()) std::rethrow_exception(take_interrupt());
      if (bounded && std::chrono::steady_clock::now() >= until) {
        raise(ErrorKind::kTimeout, c10::str("sagellm ", c10d::opTypeToString(opType_), ": wait(", timeout.count(),
                                            " ms) elapsed; the operation goes on"));
      }
      std::unique_lock<std::mutex> lock(mutex_);
      cv_.wait_for(lock, pause, [this] { return completed_; });
      pause = std::min<std::chrono::microseconds>(pause * 2, kLongest);
    }
  }
  const std::string text = error();
  if (!text.empty()) raise_coded(text);
  order();
  DeferredRelease::instance().release();
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
  // Leaked with the works that are left when the process ends.
  auto& queues = *new std::vector<Queue>();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    std::vector<WorkPtr> added;
    added.swap(added_);
    if (added.empty() && queues.empty()) {
      idle_ = true;
      const bool called = changed_.wait_for(lock, kIdle, [this] { return stopped_ || !added_.empty(); });
      idle_ = false;
      if (!called) break;
      pause = kShort;
      continue;
    }
    lock.unlock();
    sort_in(std::move(added), queues);
    pause = look(queues) ? kShort : std::min(pause * 2, kLong);
    lock.lock();
    if (!queues.empty()) changed_.wait_for(lock, pause, [this] { return stopped_; });
  }
  if (queues.empty()) delete &queues;
  running_ = false;
  changed_.notify_all();
}

void DeviceWatch::sort_in(std::vector<WorkPtr> added, std::vector<Queue>& queues) {
  for (WorkPtr& work : added) {
    auto queue =
        std::find_if(queues.begin(), queues.end(), [&](const Queue& each) { return each.stream == work->stream(); });
    if (queue == queues.end()) queue = queues.insert(queue, Queue{work->stream(), {}});
    queue->works.push_back(std::move(work));
  }
}

bool DeviceWatch::look(std::vector<Queue>& queues) {
  const auto has_ended = [](DeviceWork& work) {
    try {
      return work.poll();
    } catch (const std::exception& error) {
      work.fail(coded(ErrorKind::kRankFailed,
                      c10::str("sagellm: the device was asked for the end of an operation: ", error.what())),
                false);
      return true;
    }
  };
  bool any = false;
  for (Queue& queue : queues) {
    std::deque<WorkPtr> left;
    for (WorkPtr& work : queue.works) {
      const bool asks = left.empty() || work->watched().overdue(std::chrono::steady_clock::now());
      if (asks && has_ended(*work)) {
        any = true;
        DeferredRelease::instance().add(std::move(work), {});
      } else {
        left.push_back(std::move(work));
      }
    }
    queue.works.swap(left);
  }
  queues.erase(std::remove_if(queues.begin(), queues.end(), [](const Queue& queue) { return queue.works.empty(); }),
               queues.end());
  return any;
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
