// The Python half of `host.hpp`: c10d's store, kept exceptions, the way from the log queue to Python's logging.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <memory>
#include <stdexcept>

#include "compat.hpp"
#include "host/host.hpp"

namespace sagellm {

// Wraps c10d's store. A TCPStore is talked to over a connection of our own: opened when it is first needed, the same
// one for all that is made over that store, and closed with the last of what this function gave out.
std::shared_ptr<Store> wrap_store(const c10::intrusive_ptr<c10d::Store>& store);

// Runs `body` for the core. cxx hands `what()` to Rust and knows only std::exception; torch's text carries a C++
// backtrace nobody asked for.
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

// Writes the queued lines to Python's logging. Call with the GIL.
void drain_log();

// From now on warnings and errors go to stderr, everything else nowhere: Python's logging is going down.
void close_log();

}  // namespace sagellm
