// One object of a type for each process; a forked child gets a new one. Also a mark by which a child recognizes its
// parent's objects.
#pragma once

#include <pthread.h>

#include <atomic>

namespace sagellm {

// A child inherits the memory of a lock that another thread of its parent may have held, but not that thread. So the
// child starts with a new object and leaks the parent's copy. Neither object is ever destroyed, because threads may
// outlive static destructors.
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

// Recognizes a forked child of the process that made this object. Makes no system call.
class ProcessMark {
 public:
  bool inherited() const { return made_in_ != &per_process<Identity>(); }

 private:
  struct Identity {
    char nothing = 0;
  };
  // Never dereferenced.
  const Identity* made_in_ = &per_process<Identity>();
};

}  // namespace sagellm
