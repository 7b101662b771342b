// Raises an error in threads of the program, whatever they do meanwhile: so it learns of a failed call on a device, for
// whose end no thread waits.
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
    pid_t id;  // the system's
    // When it issued the last of them.
    Clock::time_point issued;
  };

  static Alarm& instance() { return per_process<Alarm>(); }
  // The system's id of this thread.
  static pid_t this_thread();

  // Raises the failure of a group in each of these threads, at its next bytecode; in the main thread for a thread that
  // runs no Python. Not where `knows` says that the thread got the error in another way, nor where it has just got the
  // failure of another group, which had the same cause in all likelihood. Waits for the GIL.
  void raise(uint64_t group, const std::vector<Thread>& threads, const std::string& text,
             const std::function<bool(pid_t)>& knows);
  // This thread gets the failure of the group in another way: it is not raised, if it was not yet. What else waits
  // there stays: the failure of another group, or what the program raises.
  void take_back(uint64_t group);
  // A thread has got its exception. Called by the exception's class.
  void raised();
  // This thread got it in code of ours that serves nobody's call: raises its class, with the GIL, once more.
  void raise_again(PyObject* error);
  // Nothing is raised from now on: the interpreter ends.
  void stop();

 private:
  // An exception's class. Copied and dropped with the GIL.
  using Error = std::shared_ptr<PyObject>;
  static Error keep(PyObject* error);

  struct Slot {
    // Python's number of the thread.
    unsigned long number = 0;
    // Groups whose failure has been raised there and not been seen, with the classes raised. Python keeps the last one
    // only; the thread gets it for all.
    std::map<uint64_t, Error> groups;
    // Those whose failure was seen last, and when.
    std::map<uint64_t, Error> before;
    Clock::time_point raised{};
  };

  // Held under the GIL by `raise` and `raised`, so nothing below it may wait for the GIL. Guards the rest.
  std::mutex mutex_;
  std::map<pid_t, Slot> slots_;
  bool stopped_ = false;
};

}  // namespace sagellm
