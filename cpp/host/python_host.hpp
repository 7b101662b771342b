// The Python half of `host.hpp`: c10d's store, kept exceptions, the way from the log queue to Python's logging.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <memory>
#include <stdexcept>

#include "compat.hpp"
#include "host/host.hpp"

namespace sagellm {

// Wraps c10d's store. A TCPStore is used over a connection of our own: opened at first use, shared by everything that
// is made over that store, and closed when the last object that this function returned is gone.
std::shared_ptr<Store> wrap_store(const c10::intrusive_ptr<c10d::Store>& store);

// Runs `body` for the core. cxx hands `what()` to Rust and knows only std::exception; torch's text contains a C++
// backtrace, which is left out.
template <class Body>
auto plain_errors(const Body& body) {
  try {
    return body();
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());
  } catch (const std::exception&) {
    throw;
  } catch (...) {
    throw std::runtime_error("unknown error");
  }
}

// On the main thread, the exception of its last `check_interrupt() == true`, or null; taking it forgets it.
std::exception_ptr take_interrupt() noexcept;

// Writes the queued lines to Python's logging. Call with the GIL. Throws what a signal handler raised meanwhile, such
// as KeyboardInterrupt, after the lines are written; what a handler of the log raises is reported as unraisable.
void drain_log();

// For a thread of Python's that waits in torch without the GIL, perhaps beyond the interpreter's end. Before 3.14
// CPython ends a thread that asks for the GIL then by pthread_exit, and the unwinding ends the process where it comes
// to a destructor that may not throw, as torch's guard of the GIL is. From now on this thread sleeps there instead.
void outlive_python();

// From now on warnings and errors go to stderr, everything else nowhere: Python's logging is going down.
void close_log();

}  // namespace sagellm
