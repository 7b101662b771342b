// Signals that arrive while a thread waits in the core, and the end of the interpreter.
#include <sys/syscall.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <string>
#include <utility>

#include "compat.hpp"
#include "host/host.hpp"
#include "host/python_host.hpp"

namespace sagellm {

namespace {

thread_local bool outlives_python = false;
std::terminate_handler earlier_handler = nullptr;

[[noreturn]] void sleep_or_terminate() {
  // Sleeps until the main thread has ended the process.
  while (outlives_python && !python_alive()) ::pause();
  if (earlier_handler != nullptr) earlier_handler();
  std::abort();
}

// Used only by the main thread. Never destroyed, because an exception of Python must not be freed after the
// interpreter's end.
std::exception_ptr& kept_interrupt() {
  static auto* const kept = new std::exception_ptr;
  return *kept;
}

// Only the main thread runs signal handlers; on Linux its thread id is the process id.
bool on_main_thread() {
  return ::syscall(SYS_gettid) == ::getpid();
}

}  // namespace

void outlive_python() {
  static const bool installed = [] {
    earlier_handler = std::set_terminate(&sleep_or_terminate);
    return true;
  }();
  outlives_python = installed;
}

bool check_interrupt() noexcept {
  if (!on_main_thread() || !python_alive()) return false;
  try {
    py::gil_scoped_acquire gil;
    try {
      drain_log();
    } catch (const py::error_already_set&) {
      kept_interrupt() = std::current_exception();
      return true;
    }
    if (PyErr_CheckSignals() == 0) return false;
    kept_interrupt() = std::make_exception_ptr(py::error_already_set());
    return true;
  } catch (const std::exception& error) {
    log_line(1, std::string("looking for signals failed: ") + error.what());
    return false;
  }
}

std::exception_ptr take_interrupt() noexcept {
  return on_main_thread() ? std::exchange(kept_interrupt(), nullptr) : nullptr;
}

}  // namespace sagellm
