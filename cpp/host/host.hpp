// The interfaces that the Rust core needs from its process: a store to meet the other ranks in, callbacks at the start
// and end of an operation, pending signals, and a log. This header is part of the cxx bridge (`src/ffi/bridge.rs`) and
// knows no torch, so that the generated glue compiles without it.
//
// Everything declared here may be called from any thread, without the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "rust/cxx.h"

namespace sagellm {

// The key-value store that the ranks of a group meet through. Errors are exceptions with a plain text.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(rust::Str key, rust::Slice<const uint8_t> value) const = 0;
  // False, at once, when the key is not there.
  virtual bool try_get(rust::Str key, rust::Vec<uint8_t>& value) const = 0;
  // The sum of all that any rank has added to the key.
  virtual int64_t add(rust::Str key, int64_t by) const = 0;
  // Deletes a key that only this rank reads and that no other rank sets again, where the store can do so.
  virtual void remove(rust::Str key) const = 0;
  // The same number for all stores over one connection, whose requests wait for each other.
  virtual size_t connection() const = 0;
};

// How ranks reach each other before they have a communicator. Errors are exceptions: the core sees their text, the
// caller that passed this object gets the exception itself.
class IdExchange {
 public:
  virtual ~IdExchange() = default;
  // Hands an id from rank `from` to rank `to`, or from rank 0 to all where both are negative.
  virtual void share(rust::Slice<uint8_t> id, int32_t from, int32_t to) const = 0;
};

// In the bridge.
enum class Moment : uint8_t;

// The callbacks of one operation.
class Completion {
 public:
  virtual ~Completion() = default;
  // May not throw, because no caller catches. `error` is that of the end: empty, or with its code letter. The end runs
  // no Python and does not block.
  virtual void reached(Moment moment, rust::Str error) const = 0;
};

// True when a Python signal handler raised. The exception is kept for the thread that asked; see `take_interrupt`.
bool check_interrupt() noexcept;

// Where a thread of Python's is, or the place of a call (`call_site`): "FILE:LINE in FUNCTION", of the innermost frame
// outside torch, this package and Python's library. `thread` is its pthread_self, 0 for the main thread; without a
// `site` this waits for the GIL. Empty where there is none, and where the interpreter ends.
rust::String python_place(uint64_t thread, uint32_t site) noexcept;

// Takes one line for Python's logging, under the name `sagellm`. Never runs Python here: the line is queued, and the
// main thread writes it between two of its bytecodes, or at its next look for signals while it waits in the core.
void log_line(uint8_t level, rust::Str text) noexcept;

}  // namespace sagellm
