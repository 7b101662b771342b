// Which thread, if any, owns something that one thread begins, uses and ends.
#pragma once

#include <c10/macros/Macros.h>

#include <atomic>
#include <thread>

namespace sagellm {

class OwnerThread {
 public:
  // Makes this thread the owner. Returns false if there is an owner already.
  bool begin() {
    std::thread::id nobody;
    return thread_.compare_exchange_strong(nobody, std::this_thread::get_id(), std::memory_order_acquire,
                                           std::memory_order_relaxed);
  }
  // True on the owner. Costs one relaxed load if there is no owner.
  bool is_here() const {
    const std::thread::id owner = thread_.load(std::memory_order_relaxed);
    return C10_UNLIKELY(owner != std::thread::id()) && owner == std::this_thread::get_id();
  }
  // Call it on the owner.
  void end() { thread_.store(std::thread::id(), std::memory_order_release); }

 private:
  // Written by the owner, read by every thread. Ownership is taken with acquire and given up with release, so an owner
  // sees everything that the previous owner wrote. `is_here` needs no order: a thread that reads its own id has written
  // it.
  std::atomic<std::thread::id> thread_{};
};

}  // namespace sagellm
