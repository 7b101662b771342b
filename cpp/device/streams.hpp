// Streams and events of accelerators, through c10 alone: no vendor's header, so one build serves every device.
//
// A vendor's library is called with a raw stream. Where torch gives the raw handle of its stream, that is used. Where
// it does not, the core creates a raw stream and orders it with torch's by raw events: the raw stream waits for an
// event that torch recorded, and torch's stream for one that the core recorded.
//
// Some devices have a queue on the host in front of their streams: a record is then only queued, and a wait for the raw
// event has no effect until the record has left the queue. Asking whether a stream is idle flushes that queue.
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
// The current stream of this thread.
c10::Stream current_stream(c10::Device device);
// Whether the stream's work is being recorded into a graph instead of being run; no value where torch cannot say.
std::optional<bool> capture_of(const c10::Stream& stream);

// One operation's way onto a device and back, made by `DeviceStreams::begin`. Used by one thread, whose current device
// is the operation's from `begin` to `end`.
class Passage {
 public:
  // The stream for `at::` operations before and after the raw part: the caller's stream for a synchronous operation,
  // the group's for an asynchronous one. Its work follows everything that the caller had on its stream at `begin`.
  const c10::Stream& stream() const { return stream_; }
  c10::Device device() const { return stream_.device(); }

  // A raw stream that waits for everything on `stream()`. The caller may now call a library on it, and then calls
  // `leave`.
  size_t enter();
  // Makes later work on `stream()` wait for the raw stream's work.
  void leave();
  // Call this when all work of the operation is on its stream. Returns the event that marks its end; `begun` marks its
  // start where times are measured. `asked_only`: no stream will wait for the event, so it may be recorded again as
  // soon as no other code holds it.
  std::shared_ptr<c10::Event> end(bool asked_only = false);
  const std::shared_ptr<c10::Event>& begun() const { return begun_; }

 private:
  friend class DeviceStreams;
  Passage(class DeviceStreams& owner, c10::Stream stream, bool timed, int stream_key);

  class DeviceStreams& owner_;
  const c10::Stream stream_;
  const bool timed_;
  const int stream_key_;
  // The raw stream where the core made it, else 0.
  size_t own_raw_ = 0;
  std::shared_ptr<c10::Event> begun_;
};

// The streams of one group on all devices of one type.
class DeviceStreams {
 public:
  // `core`, which must outlive this, may be null where nothing raw is needed: then `Passage::enter` may not be called.
  explicit DeviceStreams(const RustDevices* core = nullptr) : core_(core) {}

  // The group's stream on this device, from torch's pool; its default stream where the device has no pool.
  // `stream_key`: operations with different keys get different streams. Collectives have one key and each direction of
  // messages between two ranks has another, so that an operation that waits for a peer does not hold up operations that
  // do not need this peer.
  c10::Stream side(c10::Device device, int stream_key = 0);
  // Begins an operation on the caller's stream, or (`async`) on the group's stream, which then waits for the work that
  // is now on the caller's.
  Passage begin(c10::Device device, bool async, bool timed = false, int stream_key = 0);

 private:
  friend class Passage;

  // A raw event that a stream of torch was told to wait for. It is released once that stream's host queue has been
  // emptied after that: until then, the wait may not have reached the device.
  struct Told {
    c10::Stream stream;
    size_t event;
  };
  std::vector<size_t> take_told(const c10::Stream& stream);
  // A pooled event that no other code holds and no stream waits for.
  std::shared_ptr<c10::Event> asked_only(const c10::Stream& stream);

  const RustDevices* const core_;
  std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, int>, c10::Stream> side_;
  // Whether torch gives raw handles of its streams; unknown before the first try.
  std::optional<bool> native_;
  std::vector<Told> told_;
  // By device; the event that was given out first stands in front.
  std::map<c10::DeviceIndex, std::deque<std::shared_ptr<c10::Event>>> asked_only_;
};

}  // namespace sagellm
