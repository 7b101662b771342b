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
  // Hands an id from rank 0 to all.
  virtual void broadcast(rust::Slice<uint8_t> id) const = 0;
  // Hands an id from one rank to another; both call it.
  virtual void pass(rust::Slice<uint8_t> id, int32_t from, int32_t to) const = 0;
};

// The callbacks of one operation, in this order. They may not throw, because no caller catches.
class Completion {
 public:
  virtual ~Completion() = default;
  // The inputs are about to be read: strided ones are copied into their contiguous pieces.
  virtual void prepare() const = 0;
  // The outputs were written: contiguous results are copied into strided tensors.
  virtual void store_back() const = 0;
  // `error` is empty, or has its code letter. Runs no Python and does not block.
  virtual void ended(rust::Str error) const = 0;
};

// True when a Python signal handler raised. The exception is kept for the thread that asked; see `take_interrupt`.
bool check_interrupt() noexcept;

// Where a thread of Python's is: "FILE:LINE in FUNCTION", of the innermost frame outside torch, this package and
// Python's library. `thread` is its pthread_self, 0 for the main thread. Waits for the GIL. Empty where there is none,
// and where the interpreter ends.
rust::String place_of_thread(uint64_t thread) noexcept;
// The same of a call, by its `call_site`. Waits for nothing.
rust::String place_of_call(uint32_t site) noexcept;

// Takes one line for Python's logging, under the name `sagellm`. Never runs Python here: the line is queued, and the
// main thread writes it between two of its bytecodes, or at its next look for signals while it waits in the core.
void log_line(uint8_t level, rust::Str text) noexcept;

}  // namespace sagellm
