// What follows when a call on a group's devices has failed.
//
// The operation ends on its stream only when its communicator is aborted, and then the stream goes on over whatever the
// memory holds. So the order is: the group fails (in the core), the program is told, and only then the communicators
// are aborted, so that no statement of the program uses undefined numbers. Nothing of this runs on the watching thread:
// an abort may last, and the calls of other groups have deadlines, too.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "host/alarm.hpp"
#include "work/hooks.hpp"

namespace sagellm {

// How the program is told.
enum class OnFailure : uint8_t {
  kRaise,  // an exception, in each thread whose calls are under way
  kExit,   // the process ends
  kNone,   // by its next call of the group
};

// "raise", "exit" or "none"; a ValueError for any other text.
OnFailure on_failure(const std::string& text);

class Failure final : public std::enable_shared_from_this<Failure> {
 public:
  using Threads = std::vector<Alarm::Thread>;

  Failure(OnFailure then, std::shared_ptr<Events> events) : then_(then), events_(std::move(events)) {}

  // A call of this thread is under way, until `ended` is passed the returned value.
  pid_t issued();
  void ended(pid_t thread);
  // This thread captures a call into a graph: a replay may be under way at any time.
  void captured();
  // Calls under way. A counter alone: nothing is ordered by it.
  int64_t under_way() const { return under_way_.load(std::memory_order_relaxed); }
  // The threads that issued them, and those that captured calls.
  Threads threads() const;

  // The group has failed with `error`, while calls of `threads` were under way. Returns at once. Only the first failure
  // of a group is told; `abort` ends the communicators. `raised`: by a call that raises it, so that no process ends.
  void follow(const std::string& error, Threads threads, const std::function<void()>& abort, bool raised = false);
  // The program itself is about to end what is under way, on this thread. Returns when its other threads have been
  // told.
  void deliberate(const std::string& error);

 private:
  // Returns when the exception waits in each of these threads, or after a second: a thread may keep the GIL for long.
  void tell(const std::string& error, const Threads& threads);
  [[noreturn]] void exit(const std::string& error) const;

  const OnFailure then_;
  const std::shared_ptr<Events> events_;
  std::atomic<int64_t> under_way_{0};
  // Set by the first thread that follows a failure, or by an abort of the program.
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
