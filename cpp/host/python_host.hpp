// The Python half of `host.hpp`: c10d's store, kept exceptions, the way from the log queue to Python's logging.
#pragma once

#include <exception>
#include <memory>

#include "compat.hpp"
#include "host/host.hpp"

namespace sagellm {

// Wraps c10d's store. A TCPStore is talked to over a connection of our own: opened when it is first needed, the same
// one for all that is made over that store, and closed with the last of what this function gave out.
std::shared_ptr<Store> wrap_store(const c10::intrusive_ptr<c10d::Store>& store);

// On the main thread, the exception of its last `check_interrupt() == true`, or null; taking it forgets it.
std::exception_ptr take_interrupt() noexcept;

// Writes the queued lines to Python's logging. Call with the GIL.
void drain_log();

// From now on warnings and errors go to stderr, everything else nowhere: Python's logging is going down.
void close_log();

}  // namespace sagellm
