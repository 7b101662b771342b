// Handles the failure of a call on a group's devices.
//
// A failed operation leaves its stream only when its communicator is aborted. The later kernels of the stream then run
// on whatever the memory holds. So the core first marks the group as failed, then the program gets an exception, and
// only then the communicators are aborted. That way no statement of the program uses undefined numbers. None of this
// runs on the watching thread: an abort may take long, and that thread also enforces the deadlines of other groups'
// calls.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host/alarm.hpp"
#include "work/hooks.hpp"

namespace sagellm {

// How the program learns of a failure.
enum class OnFailure : uint8_t {
  kRaise,  // an exception is raised in each thread whose calls are under way
  kExit,   // the process exits
  kNone,   // only the next call of the group reports it
};

// Parses "raise", "exit" or "none". Throws a ValueError for any other text.
OnFailure on_failure(const std::string& text);

class Failure final : public std::enable_shared_from_this<Failure> {
 public:
  using Threads = std::vector<Alarm::Thread>;

  Failure(OnFailure then, std::shared_ptr<Events> events) : then_(then), events_(std::move(events)) {}

  // Counts one call of the thread that constructs this object as under way, until `end` or until the object is
  // destroyed.
  class UnderWay {
   public:
    // Counts nothing.
    UnderWay() = default;
    explicit UnderWay(std::shared_ptr<Failure> failure) : failure_(std::move(failure)), thread_(failure_->issued()) {}
    UnderWay(UnderWay&& other) noexcept : failure_(std::move(other.failure_)), thread_(other.thread_) {}
    UnderWay& operator=(UnderWay&& other) noexcept {
      std::swap(failure_, other.failure_);
      std::swap(thread_, other.thread_);
      return *this;
    }
    ~UnderWay() { end(); }
    // Call it on one thread at a time.
    void end() {
      if (const auto failure = std::exchange(failure_, nullptr)) failure->ended(thread_);
    }

   private:
    std::shared_ptr<Failure> failure_;
    pid_t thread_ = 0;
  };
  // Notes that this thread captures a call into a graph, which may be replayed at any time.
  void captured();
  // Number of calls under way. A counter alone: it orders no other memory access.
  int64_t under_way() const { return under_way_.load(std::memory_order_relaxed); }
  // Whether the group has failed, or the program has aborted it.
  bool followed() const { return followed_.load(std::memory_order_relaxed); }
  // The threads that issued the calls under way, and the threads that captured calls.
  Threads threads() const;

  // Handles the group's failure `error`, which happened while calls of `threads` were under way. Does so on a new
  // thread, or on this one if none can be started. Only the first failure of a group is reported. `abort` aborts the
  // communicators. `raised`: the failed call itself raises the error, so the process does not exit.
  void follow(const std::string& error, Threads threads, const std::function<void()>& abort, bool raised = false);
  // Call it on the thread on which the program is about to abort the calls under way. Returns when the exception is
  // pending in the program's other threads, or after a second.
  void deliberate(const std::string& error);

 private:
  pid_t issued();
  void ended(pid_t thread);
  // Raises the error in each of these threads. Returns when it is pending in all of them, or after a second, because a
  // thread may hold the GIL for long.
  void tell(const std::string& error, const Threads& threads);
  [[noreturn]] void exit(const std::string& error) const;

  const OnFailure then_;
  const std::shared_ptr<Events> events_;
  std::atomic<int64_t> under_way_{0};
  // Set by the first thread that handles a failure, or by an abort of the program. Relaxed: it orders no other access.
  std::atomic<bool> followed_{false};
  struct Issuer {
    int64_t calls = 0;
    Alarm::Clock::time_point last{};
  };
  mutable std::mutex mutex_;
  std::unordered_map<pid_t, Issuer> issuers_;
  std::set<pid_t> capturers_;
};

}  // namespace sagellm
