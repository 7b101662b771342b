// Symbols that the wheels' extension defines itself. With these symbols the extension also loads with a C library and a
// libstdc++ that are older than those at its compilation (docs/internals/release.md). Other builds compile nothing
// here.
#ifdef SAGELLM_OLD_GLIBC

#include <dlfcn.h>
#include <pthread.h>

#include <condition_variable>
#include <ctime>
#include <mutex>

namespace {

using ClockWait = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);

constexpr long kBillion = 1'000'000'000;

// Converts a time on `clock` to the clock that `pthread_cond_timedwait` reads.
timespec on_system_clock(clockid_t clock, const timespec& until) {
  timespec now{}, system{};
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &system);
  timespec found{system.tv_sec + until.tv_sec - now.tv_sec, system.tv_nsec + until.tv_nsec - now.tv_nsec};
  if (found.tv_nsec >= kBillion) {
    found.tv_nsec -= kBillion;
    ++found.tv_sec;
  } else if (found.tv_nsec < 0) {
    found.tv_nsec += kBillion;
    --found.tv_sec;
  }
  return found;
}

}  // namespace

// These three stay local to the extension: src/engine/device/exports.map does not export them.
extern "C" {

// glibc has this variable since 2.32. libstdc++ leaves out atomic operations if it is not 0. It is 0, because torch
// always has threads.
char __libc_single_threaded = 0;

// glibc has this function since 2.30. If the loaded glibc has it, that function is called. Otherwise the deadline is
// converted to the system clock, and libstdc++ checks the steady clock after the wait. If the system clock is set back
// meanwhile, this wait takes longer.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  static const auto theirs = reinterpret_cast<ClockWait>(dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (theirs != nullptr) return theirs(condition, mutex, clock, until);
  const timespec system = on_system_clock(clock, *until);
  return pthread_cond_timedwait(condition, mutex, &system);
}

// libstdc++ of GCC 12 has a second version of std::condition_variable::wait, which headers of torch call. The linker
// redirects those calls to this function (--wrap in setup.py).
void __wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(std::condition_variable* condition,
                                                                      std::unique_lock<std::mutex>* lock) {
  pthread_cond_wait(condition->native_handle(), lock->mutex()->native_handle());
}
}

#endif
