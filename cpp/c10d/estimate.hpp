// c10d's time estimation: between its start and its end, one thread's calls are not run, and their times are estimated.
#pragma once

#include <cstdint>

#include "c10d/owner_thread.hpp"

namespace sagellm {

class TimeEstimate {
 public:
  // Begins an estimation by this thread. Returns false if one is already running.
  bool begin() {
    if (!owner_.begin()) return false;
    nanoseconds_ = 0;
    return true;
  }
  // True on the thread whose estimation is running.
  bool is_here() const { return owner_.is_here(); }
  void add(uint64_t nanoseconds) { nanoseconds_ += nanoseconds; }
  // Ends the estimation of this thread. Returns the estimated time of all its calls, in microseconds.
  float end() {
    const float found = static_cast<float>(nanoseconds_) / 1000;
    owner_.end();
    return found;
  }

 private:
  // The thread whose estimation is running.
  OwnerThread owner_;
  // Used only by that thread.
  uint64_t nanoseconds_ = 0;
};

}  // namespace sagellm
