#include "work/steps.hpp"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "host/per_process.hpp"

namespace sagellm {

// The sums of a process. A forked child starts with new sums, and with no open step.
class StepTotals {
 public:
  StepTotals() { StepMeter::open_steps_.store(0, std::memory_order_relaxed); }
  static StepTotals& instance() { return per_process<StepTotals>(); }

  void add(uint64_t took, uint64_t in_calls, uint64_t in_futures) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t at = sums_.count++ % StepMeter::kKept;
    sums_.took += took;
    sums_.in_calls += in_calls;
    sums_.in_futures += in_futures;
    if (at == sums_.last.size()) sums_.last.emplace_back();
    sums_.last[at] = in_calls + in_futures;
  }
  StepSums sums() {
    const std::lock_guard<std::mutex> lock(mutex_);
    StepSums found = sums_;
    if (found.count > StepMeter::kKept) {
      std::rotate(found.last.begin(), found.last.begin() + static_cast<ptrdiff_t>(found.count % StepMeter::kKept),
                  found.last.end());
    }
    return found;
  }
  void reset() {
    const std::lock_guard<std::mutex> lock(mutex_);
    sums_ = StepSums();
  }

 private:
  std::mutex mutex_;
  StepSums sums_;
};

namespace {

uint64_t nanoseconds(clockid_t clock) {
  timespec now{};
  if (::clock_gettime(clock, &now) != 0) return 0;
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

uint64_t less(uint64_t from, uint64_t what) {
  return from - std::min(from, what);
}

}  // namespace

StepMeter::StepMeter() {
  (void)::pthread_getcpuclockid(::pthread_self(), &processor_clock_);
}

std::shared_ptr<StepMeter>& StepMeter::of_this_thread() {
  struct Own {
    Own() = default;
    Own(const Own&) = delete;
    Own& operator=(const Own&) = delete;
    // The thread may end in an open step.
    ~Own() {
      if (meter && meter->open_ > 0 && process == &StepTotals::instance()) {
        open_steps_.fetch_sub(1, std::memory_order_relaxed);
      }
    }
    StepTotals* process = nullptr;
    std::shared_ptr<StepMeter> meter;
  };
  thread_local Own own;
  if (StepTotals* const process = &StepTotals::instance(); own.process != process) {
    // A forked child leaks the inherited meter, because a thread of the parent may have held its lock at the fork.
    if (own.meter) new auto(std::move(own.meter));
    own.process = process;
    own.meter = std::make_shared<StepMeter>();
  }
  return own.meter;
}

StepMeter* StepMeter::find_open() {
  StepMeter* const meter = of_this_thread().get();
  return meter->open_ > 0 ? meter : nullptr;
}

void StepMeter::begin() {
  StepMeter& meter = *of_this_thread();
  if (meter.open_++ > 0) return;
  open_steps_.fetch_add(1, std::memory_order_relaxed);
  meter.in_calls_ = 0;
  {
    const std::lock_guard<std::mutex> lock(meter.mutex_);
    meter.in_futures_ = 0;
    if (meter.futures_.load(std::memory_order_relaxed) > 0) meter.watch_future();
  }
  meter.began_ = nanoseconds(CLOCK_MONOTONIC);
}

void StepMeter::end(bool well) {
  StepMeter& meter = *of_this_thread();
  if (meter.open_ == 0) return;
  if (--meter.open_ > 0) return;
  const uint64_t took = less(nanoseconds(CLOCK_MONOTONIC), meter.began_);
  open_steps_.fetch_sub(1, std::memory_order_relaxed);
  uint64_t in_futures = 0;
  {
    const std::lock_guard<std::mutex> lock(meter.mutex_);
    meter.stop_watching();
    in_futures = meter.in_futures_;
  }
  if (well) StepTotals::instance().add(took, meter.in_calls_, in_futures);
}

void StepMeter::enter() {
  if (depth_++ > 0) return;
  if (futures_.load(std::memory_order_relaxed) > 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_watching();
  }
  call_began_ = nanoseconds(CLOCK_MONOTONIC);
}

void StepMeter::leave() {
  if (--depth_ > 0) return;
  in_calls_ += less(nanoseconds(CLOCK_MONOTONIC), call_began_);
  if (futures_.load(std::memory_order_relaxed) > 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (futures_.load(std::memory_order_relaxed) > 0) watch_future();
  }
}

std::shared_ptr<void> StepMeter::holds_future() {
  if (open() == nullptr) return nullptr;
  std::shared_ptr<StepMeter> meter = of_this_thread();
  {
    const std::lock_guard<std::mutex> lock(meter->mutex_);
    meter->futures_.fetch_add(1, std::memory_order_relaxed);
    if (meter->depth_ == 0) meter->watch_future();
  }
  return {meter.get(), [meter](StepMeter* each) {
            const std::lock_guard<std::mutex> lock(each->mutex_);
            if (each->futures_.fetch_sub(1, std::memory_order_relaxed) == 1) each->stop_watching();
          }};
}

StepMeter::Moment StepMeter::moment() const {
  return {nanoseconds(CLOCK_MONOTONIC), nanoseconds(processor_clock_)};
}

void StepMeter::watch_future() {
  if (watching_) return;
  since_ = moment();
  watching_ = true;
}

void StepMeter::stop_watching() {
  if (!watching_) return;
  watching_ = false;
  const Moment now = moment();
  // The owning thread has ended: its clock is gone.
  if (now.processor < since_.processor) return;
  in_futures_ += less(less(now.wall, since_.wall), now.processor - since_.processor);
}

StepSums StepMeter::sums() {
  return StepTotals::instance().sums();
}
void StepMeter::reset() {
  StepTotals::instance().reset();
}

}  // namespace sagellm
