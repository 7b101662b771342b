// One object of a kind in each process, made anew in a forked child.
#pragma once

#include <pthread.h>

#include <atomic>

namespace sagellm {

// A child inherits the memory of a lock that another thread of its parent may have held, and none of that thread. So it
// starts with a fresh object, and the parent's copy is leaked. Neither is ever destroyed: threads may outlive static
// destructors.
template <class T>
T& per_process() {
  static std::atomic<T*> current{nullptr};
  static const bool made = [] {
    current = new T();
    ::pthread_atfork(nullptr, nullptr, [] { current = new T(); });
    return true;
  }();
  (void)made;
  return *current.load(std::memory_order_acquire);
}

}  // namespace sagellm
