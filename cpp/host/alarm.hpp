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

  // Raises the failure of a group in each of these threads, at the thread's next bytecode. If a thread runs no Python,
  // the main thread gets the failure instead. A thread for which `knows` is true is left out, because it has already
  // got the failure. A thread that has just got the failure of another group is also left out, because the two failures
  // very likely have the same cause. Waits for the GIL.
  void raise(uint64_t group, const std::vector<Thread>& threads, const std::string& text,
             const std::function<bool(pid_t)>& knows);
  // Withdraws the group's failure if it is pending in this thread. Call this if the thread gets the failure by other
  // means. The failure of another group stays pending, and so does an exception that the program raises.
  void take_back(uint64_t group);
  // This thread has got its exception. Called by the constructor of the exception's class.
  void raised();
  // Makes an exception pending in this thread once more; `error` is its class. Call this if Python raised the exception
  // in code of this package that the program did not call, such as the writing of log lines. Needs the GIL.
  void raise_again(PyObject* error);
  // From now on nothing is raised, because the interpreter is ending.
  void stop();

 private:
  // A reference to the class of an exception. Copy and drop it only while holding the GIL.
  using Error = std::shared_ptr<PyObject>;
  static Error keep(PyObject* error);

  struct Slot {
    // Python's identifier of the thread.
    unsigned long number = 0;
    // Groups whose failure is pending in the thread, with the exception classes. Python keeps only the last pending
    // exception of a thread, so this exception reports the failures of all these groups to the thread.
    std::map<uint64_t, Error> groups;
    // Groups whose failure the thread got with its last exception. `raised` is the time at which it got that exception.
    std::map<uint64_t, Error> before;
    Clock::time_point raised{};
  };

  // Guards the fields below. `raise` and `raised` lock this mutex while they hold the GIL, so a thread must not wait
  // for the GIL while it holds this mutex.
  std::mutex mutex_;
  std::map<pid_t, Slot> slots_;
  bool stopped_ = false;
};

}  // namespace sagellm
