// The interfaces that the Rust core needs from its process: a store in which the ranks meet, callbacks at the start and
// end of an operation, pending signals, and a log. This header is part of the cxx bridge (`src/ffi/bridge.rs`). It
// includes no torch header, so that the generated code compiles without torch.
//
// Everything declared here may be called from any thread, without the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "rust/cxx.h"

namespace sagellm {

// A Rust object: `src/ffi/callbacks.rs`.
struct ParallelPart;

// The key-value store through which the ranks of a group meet. Errors are exceptions with a plain text.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(rust::Str key, rust::Slice<const uint8_t> value) const = 0;
  // Returns false immediately if the key is missing.
  virtual bool try_get(rust::Str key, rust::Vec<uint8_t>& value) const = 0;
  // Returns the sum of all values that any rank has added to the key.
  virtual int64_t add(rust::Str key, int64_t by) const = 0;
  // Deletes a key, if the store can delete keys. Only this rank reads the key, and no other rank sets it again.
  virtual void remove(rust::Str key) const = 0;
  // A number that is equal for all stores over one connection. Requests over one connection wait for each other.
  virtual size_t connection() const = 0;
};

// How ranks reach each other before they have a communicator. Errors are exceptions: the core gets their text, and the
// caller that passed this object gets the exception itself.
class IdExchange {
 public:
  virtual ~IdExchange() = default;
  // Sends an id from rank 0 to all ranks.
  virtual void broadcast(rust::Slice<uint8_t> id) const = 0;
  // Sends an id from one rank to another; both call it.
  virtual void pass(rust::Slice<uint8_t> id, int32_t from, int32_t to) const = 0;
};

// The callbacks of one operation, called in this order. They must not throw, because no caller catches.
class Completion {
 public:
  virtual ~Completion() = default;
  // The inputs are about to be read: copies strided inputs into contiguous memory.
  virtual void prepare() const = 0;
  // The outputs were written: copies contiguous results into strided tensors.
  virtual void store_back() const = 0;
  // The operation has ended. `error` is empty, or begins with its code letter. Runs no Python and does not block.
  virtual void ended(rust::Str error) const = 0;
};

// True if a Python signal handler raised. The exception is kept for the thread that asked; see `take_interrupt`.
bool check_interrupt() noexcept;

// Where a Python thread is now: "FILE:LINE in FUNCTION" of the innermost frame outside of torch, this package and
// Python's library. `thread` is the thread's pthread_self, or 0 for the main thread. Waits for the GIL. Empty if
// there is no such frame, or if the interpreter is ending.
rust::String place_of_thread(uint64_t thread) noexcept;
// "FILE:LINE in FUNCTION" of the program's call; `site` is the number that `call_site` returned. Never blocks.
rust::String place_of_call(uint32_t site) noexcept;

// The number of threads that `run_parallel` would use if the calling thread called it now. 1 inside a parallel region,
// and if the compiler of this package had no OpenMP.
size_t intraop_threads() noexcept;
// Calls `part.run` with each number below `parts`, on torch's intra-op threads, and returns after all calls. The
// calling thread is one of these threads.
void run_parallel(size_t parts, const ParallelPart& part) noexcept;

// Queues one line for Python's logging, under the name `sagellm`. It never runs Python: the main thread writes the line
// between two of its bytecodes, or at its next check for signals while it waits in the core.
void log_line(uint8_t level, rust::Str text) noexcept;

}  // namespace sagellm
