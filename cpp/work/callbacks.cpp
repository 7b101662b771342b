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
// The queue of the job that this pool thread runs. Negative on a thread that runs none.
thread_local int current_queue = -1;

// Leaks a job that will not run: it may own Python objects, which can no longer be dropped.
void leak(std::function<void()> job) {
  new std::function<void()>(std::move(job));
}

}  // namespace

void CallbackPool::post(std::function<void()> job, size_t queue) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (stopped_) return leak(std::move(job));
  auto& jobs = queues_[queue].jobs;
  jobs.push_back(std::move(job));
  call_a_thread();
  if (threads_ > 0) return;
  // No thread exists and none can be started. This is the wrong thread for the job, but otherwise the job would never
  // run.
  job = std::move(jobs.back());
  jobs.pop_back();
  lock.unlock();
  run_logged(job);
}

size_t CallbackPool::queue_of_futures() {
  return current_queue < 0 ? 0 : 1 - static_cast<size_t>(current_queue);
}

bool CallbackPool::is_empty() const {
  return std::all_of(queues_.begin(), queues_.end(), [](const Queue& queue) { return queue.jobs.empty(); });
}

bool CallbackPool::has_ready() const {
  return std::any_of(queues_.begin(), queues_.end(),
                     [](const Queue& queue) { return !queue.jobs.empty() && queue.turn == 0; });
}

CallbackPool::Clock::time_point CallbackPool::first_end() const {
  auto first = Clock::time_point::max();
  for (const Queue& queue : queues_) {
    if (!queue.jobs.empty() && queue.turn != 0) first = std::min(first, turn_ends(queue));
  }
  return first;
}

void CallbackPool::call_a_thread() {
  if (is_empty()) return;
  if (idle_ == 0) {
    // A thread that is starting will look at both queues.
    if (starting_ == 0 && threads_ < kMostThreads) add_thread();
    return;
  }
  if (has_ready() || first_end() < watched_until_) work_.notify_one();
}

void CallbackPool::about_to_block() {
  if (current_turn != 0) instance().give_turn_away(std::exchange(current_turn, 0));
}

void CallbackPool::give_turn_away(uint64_t turn) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Queue& queue : queues_) {
    queue.slow.erase(turn);
    if (queue.turn == turn) queue.turn = 0;
  }
  call_a_thread();
}

CallbackPool::Clock::time_point CallbackPool::turn_ends(const Queue& queue) {
  constexpr auto kTurn = std::chrono::milliseconds(5);
  constexpr size_t kLongest = 10;
  return queue.turn_began + kTurn * std::min(queue.slow.size() + 1, kLongest);
}

void CallbackPool::add_thread() {
  const BlockSignals block;
  try {
    std::thread([this] { serve(); }).detach();
    ++threads_;
    ++starting_;
  } catch (const std::system_error&) {
    // The existing threads run the jobs. If there are none, `post` runs the job itself.
  }
}

void CallbackPool::serve() {
  pthread_setname_np(pthread_self(), "sagellm-call");
  constexpr auto kIdle = std::chrono::seconds(10);
  std::unique_lock<std::mutex> lock(mutex_);
  --starting_;
  while (!stopped_) {
    if (Queue* const queue = next_queue()) {
      run(lock, *queue);
      continue;
    }
    const auto ends = first_end();
    const bool watches = ends < watched_until_;
    if (watches) watched_until_ = ends;
    ++idle_;
    const bool called = work_.wait_until(lock, watches ? ends : Clock::now() + kIdle, [&] {
      return stopped_ || has_ready() || first_end() < (watches ? ends : watched_until_);
    });
    --idle_;
    if (watches) {
      watched_until_ = Clock::time_point::max();
    } else if (!called) {
      break;
    }
  }
  --threads_;
  left_.notify_all();
}

CallbackPool::Queue* CallbackPool::next_queue() {
  // The second queue first, because jobs of the first one may be waiting for its jobs.
  for (const size_t number : {size_t{1}, size_t{0}}) {
    Queue& queue = queues_[number];
    if (queue.jobs.empty()) continue;
    if (queue.turn == 0) return &queue;
    if (Clock::now() < turn_ends(queue)) continue;
    queue.slow.insert(queue.turn);
    return &queue;
  }
  return nullptr;
}

void CallbackPool::run(std::unique_lock<std::mutex>& lock, Queue& queue) {
  const uint64_t turn = ++last_turn_;
  queue.turn = turn;
  queue.turn_began = Clock::now();
  // On the heap, so that unwinding of the thread does not destroy the objects that the job owns (see `run_logged`).
  auto* job = new std::function<void()>(std::move(queue.jobs.front()));
  queue.jobs.pop_front();
  // If more jobs are queued, an idle thread must be ready to start the next one, now or if this job exceeds its turn.
  call_a_thread();
  ++running_;
  lock.unlock();
  // If the interpreter is ending, the job is leaked.
  if (python_alive()) {
    current_turn = turn;
    current_queue = &queue == &queues_[0] ? 0 : 1;
    run_logged(*job);
    current_queue = -1;
    current_turn = 0;
    delete job;
  }
  lock.lock();
  --running_;
  queue.slow.erase(turn);
  if (queue.turn == turn) queue.turn = 0;
}

void CallbackPool::settle(std::chrono::milliseconds patience) {
  constexpr auto kPause = std::chrono::milliseconds(5);
  const auto until = Clock::now() + patience;
  std::unique_lock<std::mutex> lock(mutex_);
  while ((!is_empty() || running_ > 0) && Clock::now() < until) left_.wait_for(lock, kPause);
}

void CallbackPool::stop(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  stopped_ = true;
  work_.notify_all();
  left_.wait_for(lock, patience, [this] { return threads_ == 0; });
  for (Queue& queue : queues_) {
    for (auto& job : queue.jobs) leak(std::move(job));
    queue.jobs.clear();
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
