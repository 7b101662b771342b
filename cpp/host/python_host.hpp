// The part of `host.hpp` that uses torch and Python: c10d's store, kept exceptions, and the writing of queued log
// lines.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <memory>
#include <stdexcept>

#include "compat.hpp"
#include "host/host.hpp"

namespace sagellm {

// Wraps c10d's store. A TCPStore is used over a connection of our own. That connection is opened at first use. All
// objects that this function returns for the same store share it, and it is closed when the last of them is destroyed.
std::shared_ptr<Store> wrap_store(const c10::intrusive_ptr<c10d::Store>& store);

// Runs `body` for the core. cxx catches only std::exception and passes `what()` to Rust. The text of a c10::Error
// contains a C++ backtrace, which is left out.
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

// On the main thread: returns the exception of its last `check_interrupt() == true`, and forgets it. Null if there is
// none.
std::exception_ptr take_interrupt() noexcept;

// Writes the queued lines to Python's logging. Call with the GIL. If a signal handler raises meanwhile
// (KeyboardInterrupt, say), throws that exception after the lines are written. Exceptions of a log handler are reported
// as unraisable.
void drain_log();

// For a Python thread that waits in torch without the GIL, perhaps beyond the interpreter's end. If the thread then
// asks for the GIL, CPython before 3.14 ends the thread by pthread_exit. The unwinding ends the process when it reaches
// a destructor that must not throw, such as the one of torch's GIL guard. After this call, the thread sleeps at that
// point instead.
void outlive_python();

// From now on warnings and errors go to stderr and other lines are dropped, because Python's logging is shutting down.
void close_log();

}  // namespace sagellm
