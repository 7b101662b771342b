#include "device/failure.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "host/errors.hpp"
#include "host/host.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

namespace {

// Longest time for which an abort waits until the exception is pending in the program's threads.
constexpr auto kPatience = std::chrono::seconds(1);
// Longest time for which an exit waits for abort hooks, which may still write a trace.
constexpr auto kLastWords = std::chrono::seconds(5);
// Exit code of the process: EX_SOFTWARE of sysexits.h.
constexpr int kExitCode = 70;

// Runs `body` on a new detached thread. Returns false if no thread can be started.
template <class Body>
bool start(const char* name, Body body) {
  const BlockSignals block;
  try {
    std::thread([name, body = std::move(body)]() mutable {
      pthread_setname_np(pthread_self(), name);
      body();
    }).detach();
    return true;
  } catch (const std::system_error& error) {
    log_line(1, std::string("no thread to follow a failed call on a device: ") + error.what());
    return false;
  }
}

}  // namespace

OnFailure on_failure(const std::string& text) {
  if (text == "raise") return OnFailure::kRaise;
  if (text == "exit") return OnFailure::kExit;
  if (text == "none") return OnFailure::kNone;
  value_error("init",
              c10::str("the option on_device_failure is \"", text,
                       "\", expected \"raise\", \"exit\" or \"none\" (SAGELLM_ON_DEVICE_FAILURE overrides it)"));
}

pid_t Failure::issued() {
  const pid_t thread = Alarm::this_thread();
  const std::lock_guard<std::mutex> lock(mutex_);
  Issuer& issuer = issuers_[thread];
  ++issuer.calls;
  issuer.last = Alarm::Clock::now();
  under_way_.fetch_add(1, std::memory_order_relaxed);
  return thread;
}

void Failure::ended(pid_t thread) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto issuer = issuers_.find(thread);
  if (issuer != issuers_.end() && --issuer->second.calls == 0) issuers_.erase(issuer);
  under_way_.fetch_sub(1, std::memory_order_relaxed);
}

void Failure::captured() {
  const std::lock_guard<std::mutex> lock(mutex_);
  capturers_.insert(Alarm::this_thread());
}

Failure::Threads Failure::threads() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Threads found;
  for (const pid_t thread : capturers_) found.push_back({thread, Alarm::Clock::now()});
  for (const auto& [thread, issuer] : issuers_) {
    if (capturers_.count(thread) == 0) found.push_back({thread, issuer.last});
  }
  return found;
}

void Failure::follow(const std::string& error, Threads threads, const std::function<void()>& abort, bool raised) {
  if (followed_.exchange(true)) return;
  const auto what = [self = shared_from_this(), error, threads = std::move(threads), abort, raised] {
    if (self->then_ == OnFailure::kExit && !raised) self->exit(error);
    if (self->then_ != OnFailure::kNone) self->tell(error, threads);
    abort();
  };
  if (!start("sagellm-abort", what)) what();
}

void Failure::deliberate(const std::string& error) {
  events_->told();
  followed_ = true;
  if (then_ != OnFailure::kNone) tell(error, threads());
}

void Failure::tell(const std::string& error, const Threads& threads) {
  const auto knows = [events = events_](pid_t thread) { return events->knows(thread); };
  const bool all = std::all_of(threads.begin(), threads.end(), [&](const auto& each) { return knows(each.id); });
  if (all || error.empty()) return;
  // Not a std::future: waiting for one with a deadline needs a newer libstdc++ than the wheels may require.
  struct Done {
    std::mutex mutex;
    std::condition_variable changed;
    bool is = false;
  };
  const auto done = std::make_shared<Done>();
  const auto raise = [group = events_->key(), threads, knows, done, text = text_of(error)] {
    try {
      Alarm::instance().raise(group, threads, text, knows);
    } catch (const std::exception& problem) {
      log_line(1, std::string("the program could not be told of a failed call on a device: ") + problem.what());
    }
    const std::lock_guard<std::mutex> lock(done->mutex);
    done->is = true;
    done->changed.notify_all();
  };
  if (!start("sagellm-raise", raise)) return;
  std::unique_lock<std::mutex> lock(done->mutex);
  done->changed.wait_for(lock, kPatience, [&done] { return done->is; });
}

void Failure::exit(const std::string& error) const {
  // The core has already written its dump. torch's abort hooks write their dumps on callback threads, so wait for these
  // threads.
  CallbackPool::instance().settle(kLastWords);
  std::fprintf(stderr, "%s\nsagellm: this process ends with code %d, as on_device_failure=\"exit\" asks\n",
               text_of(error).c_str(), kExitCode);
  ::_exit(kExitCode);
}

}  // namespace sagellm
