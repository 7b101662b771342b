// Raises an error in threads of the program, whatever these threads do meanwhile. That is how the program learns of a
// failed call on a device, because no thread waits for the end of such a call.
#pragma once

#include <sys/types.h>
#include <torch/csrc/python_headers.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "host/per_process.hpp"

namespace sagellm {

class Alarm {
 public:
  using Clock = std::chrono::steady_clock;

  // A thread that may use the results of calls.
  struct Thread {
    pid_t id;  // system id
    // When the thread issued the last of these calls.
    Clock::time_point issued;
  };

  static Alarm& instance() { return per_process<Alarm>(); }
  // The system id of this thread.
  static pid_t this_thread();

  // Raises the failure of a group in each of these threads, at its next bytecode. In place of a thread that runs no
  // Python, the main thread gets it. A thread is left out if `knows` says that it has got the error by other means. It
  // is also left out if it has just got the failure of another group, which very likely had the same cause. Waits for
  // the GIL.
  void raise(uint64_t group, const std::vector<Thread>& threads, const std::string& text,
             const std::function<bool(pid_t)>& knows);
  // This thread gets the group's failure by other means: if the failure is still pending in it, this withdraws it.
  // Other pending exceptions stay: the failure of another group, or an exception that the program raises.
  void take_back(uint64_t group);
  // This thread has got its exception. Called by the constructor of the exception's class.
  void raised();
  // This thread got the exception in code of ours that serves no call of the program, such as the writing of log lines.
  // Makes the exception pending once more; `error` is its class. Call with the GIL.
  void raise_again(PyObject* error);
  // From now on nothing is raised, because the interpreter is ending.
  void stop();

 private:
  // The class of an exception. Copied and dropped with the GIL.
  using Error = std::shared_ptr<PyObject>;
  static Error keep(PyObject* error);

  struct Slot {
    // Python's identifier of the thread.
    unsigned long number = 0;
    // Groups whose failure is pending in the thread, with the exception classes. Python keeps only the last pending
    // exception of a thread, so the thread gets that one for all these groups.
    std::map<uint64_t, Error> groups;
    // Groups whose failure the thread got with its last exception. `raised` is the time at which it got that exception.
    std::map<uint64_t, Error> before;
    Clock::time_point raised{};
  };

  // `raise` and `raised` take it while they hold the GIL, so a thread that holds it may not wait for the GIL. Guards
  // the fields below.
  std::mutex mutex_;
  std::map<pid_t, Slot> slots_;
  bool stopped_ = false;
};

}  // namespace sagellm
