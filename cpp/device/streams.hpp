// Streams and events of accelerators through c10 alone. No vendor's header is used, so one build serves every device.
//
// A vendor's library is called with a raw stream. If torch exposes the raw handle of its stream, the library gets that
// handle. Otherwise the core creates a raw stream and orders it with torch's by raw events: the raw stream waits for an
// event that torch recorded, and torch's stream waits for an event that the core recorded.
//
// On some devices each stream has a queue on the host in front of it. There, recording an event first only queues the
// record, and a wait for its raw event has no effect until the record has left the queue. Asking whether the stream is
// idle flushes the queue.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "compat.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

// True for a device whose tensors are not plain host memory.
inline bool is_accelerator(c10::Device device) {
  return !device.is_cpu() && !device.is_meta();
}

// Returns the device with its index: if it has none, the current device of its type.
c10::Device with_index(c10::Device device);
// This thread's current stream on the device.
c10::Stream current_stream(c10::Device device);
// Whether the stream's work is captured into a graph instead of run; no value if torch cannot tell.
std::optional<bool> capture_of(const c10::Stream& stream);

// Orders one operation on a device after the caller's work; made by `DeviceStreams::begin`. Used by one thread, whose
// current device must be the operation's from `begin` to `end`.
class Passage {
 public:
  // The stream for `at::` operations before and after the library's call: the caller's stream for a synchronous
  // operation, the group's for an asynchronous one. Its work follows all work that was on the caller's stream at
  // `begin`.
  const c10::Stream& stream() const { return stream_; }
  c10::Device device() const { return stream_.device(); }

  // Returns a raw stream that waits for all work on `stream()`. The caller may call a library on it, and must then call
  // `leave`.
  size_t enter();
  // Makes later work on `stream()` wait for the raw stream's work.
  void leave();
  // Call this when all work of the operation is on its stream. Returns the event at the end of that work. If times are
  // measured, `begun` is the event at its start. `asked_only`: no stream will wait for the returned event, so it may be
  // recorded again as soon as no other code holds it.
  std::shared_ptr<c10::Event> end(bool asked_only = false);
  const std::shared_ptr<c10::Event>& begun() const { return begun_; }

 private:
  friend class DeviceStreams;
  Passage(class DeviceStreams& owner, c10::Stream stream, bool timed, int stream_key);

  class DeviceStreams& owner_;
  const c10::Stream stream_;
  const bool timed_;
  const int stream_key_;
  // The raw stream if the core made it, else 0.
  size_t own_raw_ = 0;
  std::shared_ptr<c10::Event> begun_;
};

// The streams of one group on all devices of one type.
class DeviceStreams {
 public:
  // `core` must outlive this object. It may be null if `Passage::enter` is never called.
  explicit DeviceStreams(const RustDevices* core = nullptr) : core_(core) {}

  // Returns the group's stream on this device, from torch's pool, or the device's default stream if it has no pool.
  // Operations with different `stream_key` get different streams. Collectives share one key, and each direction of
  // messages between two ranks has its own key. So an operation that waits for a peer does not hold up operations that
  // do not need this peer.
  c10::Stream side(c10::Device device, int stream_key = 0);
  // Begins an operation on the caller's current stream `callers` or, with `async`, on the group's stream. The group's
  // stream first waits for the work that is now on the caller's stream.
  Passage begin(const c10::Stream& callers, bool async, bool timed = false, int stream_key = 0);

 private:
  friend class Passage;

  // A raw event that a stream of torch waits for. The core may reuse the event after the stream's queue on the host has
  // been flushed; before that, the wait may not have reached the device.
  struct Told {
    c10::Stream stream;
    size_t event;
  };
  std::vector<size_t> take_told(const c10::Stream& stream);
  // Returns a pooled event that no other code holds and no stream waits for.
  std::shared_ptr<c10::Event> asked_only(const c10::Stream& stream);

  const RustDevices* const core_;
  std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, int>, c10::Stream> side_;
  // Whether torch exposes the raw handles of its streams; no value before the first attempt.
  std::optional<bool> native_;
  std::vector<Told> told_;
  // Pooled events of each device, in the order in which they were handed out.
  std::map<c10::DeviceIndex, std::deque<std::shared_ptr<c10::Event>>> asked_only_;
};

}  // namespace sagellm
