#include "work/callbacks.hpp"

#include <cxxabi.h>
#include <pthread.h>

#include <algorithm>
#include <exception>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "compat.hpp"
#include "host/host.hpp"

namespace sagellm {

namespace {

void run_logged(const std::function<void()>& job) {
  try {
    job();
  } catch (const std::exception& error) {
    log_line(1, std::string("a callback of an operation failed: ") + error.what());
  } catch (const abi::__forced_unwind&) {
    // The interpreter throws this exception to end a thread that asks for the GIL too late. Its unwinding must not be
    // stopped.
    throw;
  } catch (...) {
    log_line(1, "a callback of an operation failed");
  }
}

// Number of the job that this pool thread runs, until it gives up its turn. 0 on all other threads.
thread_local uint64_t current_turn = 0;
// True while this pool thread runs a job.
thread_local bool in_a_job = false;

// Leaks a job that will not run: it may own Python objects, which can no longer be dropped.
void leak(std::function<void()> job) {
  new std::function<void()>(std::move(job));
}

}  // namespace

void CallbackPool::post(std::function<void()> job) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (stopped_) return leak(std::move(job));
  jobs_.push_back(std::move(job));
  call_a_thread();
  if (threads_ > 0) return;
  // No thread exists and none can be started. This is the wrong thread for the job, but otherwise the job would never
  // run.
  job = std::move(jobs_.back());
  jobs_.pop_back();
  lock.unlock();
  run_logged(job);
}

void CallbackPool::post_beside(std::function<void()> job) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!stopped_ && threads_ > 0 && beside_.size() + running_beside_ < kMostBeside) {
      beside_.push_back(std::move(job));
      if (idle_ == 0 && threads_ < kMostThreads) {
        add_thread();
      } else {
        work_.notify_one();
      }
      return;
    }
  }
  post(std::move(job));
}

bool CallbackPool::runs_this_thread() {
  return in_a_job;
}

void CallbackPool::call_a_thread() {
  if (idle_ == 0) {
    if (threads_ < kMostThreads) add_thread();
    return;
  }
  if (turn_ == 0 || !watched_) work_.notify_one();
}

void CallbackPool::about_to_block() {
  if (current_turn != 0) instance().give_turn_away(std::exchange(current_turn, 0));
}

void CallbackPool::give_turn_away(uint64_t turn) {
  const std::lock_guard<std::mutex> lock(mutex_);
  slow_.erase(turn);
  if (turn_ != turn) return;
  turn_ = 0;
  if (!jobs_.empty()) call_a_thread();
}

CallbackPool::Clock::time_point CallbackPool::turn_ends() const {
  constexpr auto kTurn = std::chrono::milliseconds(5);
  constexpr size_t kLongest = 10;
  return turn_began_ + kTurn * std::min(slow_.size() + 1, kLongest);
}

void CallbackPool::add_thread() {
  const BlockSignals block;
  try {
    std::thread([this] { serve(); }).detach();
    ++threads_;
  } catch (const std::system_error&) {
    // The existing threads run the jobs. If there are none, `post` runs the job itself.
  }
}

void CallbackPool::serve() {
  pthread_setname_np(pthread_self(), "sagellm-call");
  constexpr auto kIdle = std::chrono::seconds(10);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    if (!beside_.empty()) {
      ++running_beside_;
      run(lock, take(beside_), 0);
      --running_beside_;
      continue;
    }
    if (jobs_.empty()) {
      ++idle_;
      const bool called =
          work_.wait_for(lock, kIdle, [this] { return stopped_ || !jobs_.empty() || !beside_.empty(); });
      --idle_;
      if (!called) break;
      continue;
    }
    if (turn_ != 0) {
      const auto ends = turn_ends();
      if (Clock::now() < ends) {
        ++idle_;
        watched_ = true;
        work_.wait_until(lock, ends, [this] { return stopped_ || turn_ == 0 || !beside_.empty(); });
        watched_ = false;
        --idle_;
        continue;
      }
      slow_.insert(turn_);
    }
    turn_ = ++last_turn_;
    turn_began_ = Clock::now();
    run(lock, take(jobs_), turn_);
  }
  --threads_;
  left_.notify_all();
}

std::function<void()>* CallbackPool::take(std::deque<std::function<void()>>& from) {
  auto* job = new std::function<void()>(std::move(from.front()));
  from.pop_front();
  return job;
}

void CallbackPool::run(std::unique_lock<std::mutex>& lock, std::function<void()>* job, uint64_t turn) {
  // More jobs are queued: an idle thread must be ready to start the next one if the current turn lasts too long.
  if (!jobs_.empty() && !watched_) call_a_thread();
  ++running_;
  lock.unlock();
  // If the interpreter is ending, the job is leaked.
  if (python_alive()) {
    current_turn = turn;
    in_a_job = true;
    run_logged(*job);
    in_a_job = false;
    current_turn = 0;
    delete job;
  }
  lock.lock();
  --running_;
  if (turn == 0) return;
  slow_.erase(turn);
  if (turn_ == turn) turn_ = 0;
}

void CallbackPool::settle(std::chrono::milliseconds patience) {
  constexpr auto kPause = std::chrono::milliseconds(5);
  const auto until = Clock::now() + patience;
  std::unique_lock<std::mutex> lock(mutex_);
  while ((!jobs_.empty() || !beside_.empty() || running_ > 0) && Clock::now() < until) left_.wait_for(lock, kPause);
}

void CallbackPool::stop(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  stopped_ = true;
  work_.notify_all();
  left_.wait_for(lock, patience, [this] { return threads_ == 0; });
  for (auto* jobs : {&jobs_, &beside_}) {
    for (auto& job : *jobs) leak(std::move(job));
    jobs->clear();
  }
}

void drop(std::vector<at::Tensor> tensors) noexcept {
  constexpr size_t kMany = 16;
  if (tensors.size() < kMany || !python_alive()) return;
  const PyGILState_STATE before = PyGILState_Ensure();
  tensors.clear();
  PyGILState_Release(before);
}

void DeferredRelease::add(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors,
                          std::shared_ptr<void> other) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (graves_.empty()) since_ = std::chrono::steady_clock::now();
  graves_.push_back({std::move(work), std::move(tensors), std::move(other)});
  filled_.store(true, std::memory_order_relaxed);
}

void DeferredRelease::post() {
  if (empty()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (graves_.empty() || now - since_ < kPatience) return;
    since_ = now;  // the callback thread gets this long before the next post
  }
  CallbackPool::instance().post([] { instance().release(); });
}

void DeferredRelease::drop_all() {
  if (!python_alive()) return;
  std::vector<Grave> graves;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    graves.swap(graves_);
    filled_.store(false, std::memory_order_relaxed);
  }
  // The references are dropped here, without the lock, because a destructor may call this class again.
  for (Grave& grave : graves) drop(std::move(grave.tensors));
}

}  // namespace sagellm
