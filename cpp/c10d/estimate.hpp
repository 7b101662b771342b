// c10d's time estimation: between its start and its end, the calls of one thread are estimated and not made.
#pragma once

#include <c10/macros/Macros.h>

#include <atomic>
#include <cstdint>
#include <thread>

namespace sagellm {

class TimeEstimate {
 public:
  // Begins an estimation by this thread. False if one is running.
  bool begin() {
    bool running = false;
    if (!begun_.compare_exchange_strong(running, true, std::memory_order_acquire)) return false;
    nanoseconds_ = 0;
    thread_ = std::this_thread::get_id();
    running_.store(true, std::memory_order_release);
    return true;
  }
  // True on the thread whose estimation is running.
  bool is_here() const {
    return C10_UNLIKELY(running_.load(std::memory_order_acquire)) && thread_ == std::this_thread::get_id();
  }
  void add(uint64_t nanoseconds) { nanoseconds_ += nanoseconds; }
  // Ends the estimation of this thread. Returns the estimated time of all its calls, in microseconds.
  float end() {
    const float found = static_cast<float>(nanoseconds_) / 1000;
    running_.store(false, std::memory_order_relaxed);
    begun_.store(false, std::memory_order_release);
    return found;
  }

 private:
  // True from the beginning of an estimation to its end. It is set with acquire and cleared with release, so a thread
  // that sets it sees everything that the previous thread had written.
  std::atomic<bool> begun_{false};
  // Like `begun_`, but set after `thread_`. The estimating thread writes it, and every thread that makes a call reads
  // it (acquire). So a thread that reads true also reads the estimating thread's id.
  std::atomic<bool> running_{false};
  std::thread::id thread_;
  uint64_t nanoseconds_ = 0;
};

}  // namespace sagellm
