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

// Names the current device of its type where no index says which.
c10::Device with_index(c10::Device device);
// The stream that this thread works on.
c10::Stream current_stream(c10::Device device);
// Whether the stream's work is being recorded into a graph instead of being run; nothing where torch cannot say.
std::optional<bool> capture_of(const c10::Stream& stream);

// One operation's way onto a device and back, made by `DeviceStreams::begin`. Used by one thread, whose current device
// is the operation's from `begin` to `end`.
class Passage {
 public:
  // Where `at::` operations before and after the raw part belong: the caller's stream for a synchronous operation, the
  // group's for an asynchronous one. Behind everything that the caller had on its stream at `begin`.
  const c10::Stream& stream() const { return stream_; }
  c10::Device device() const { return stream_.device(); }

  // A raw stream behind everything on `stream()`. Calls to a library that name it may follow, then `leave`.
  size_t enter();
  // What follows on `stream()` runs behind the raw stream's work.
  void leave();
  // Everything is on its stream. The event stands for its end; `begun` for its start where times are wanted.
  // `asked_only`: no stream will wait for it, so that it may be recorded again as soon as nobody holds it.
  std::shared_ptr<c10::Event> end(bool asked_only = false);
  const std::shared_ptr<c10::Event>& begun() const { return begun_; }

 private:
  friend class DeviceStreams;
  Passage(class DeviceStreams& owner, c10::Stream stream, bool timed, int stream_key);

  class DeviceStreams& owner_;
  const c10::Stream stream_;
  const bool timed_;
  const int stream_key_;
  // The raw stream where it is the core's own, else 0.
  size_t own_raw_ = 0;
  std::shared_ptr<c10::Event> begun_;
};

// The streams of one group on all devices of one type.
class DeviceStreams {
 public:
  // `core`, which must outlive this, may be null where nothing raw is needed: then `Passage::enter` may not be called.
  explicit DeviceStreams(const RustDevices* core = nullptr) : core_(core) {}

  // The group's stream on this device, from torch's pool; its default stream where the device has no pool.
  // What may wait for a peer while another may not wait for it has a stream key, and so a stream, of its own.
  c10::Stream side(c10::Device device, int stream_key = 0);
  // Begins an operation on the caller's stream, or (`async`) on the group's, behind what the caller's holds now.
  Passage begin(c10::Device device, bool async, bool timed = false, int stream_key = 0);

 private:
  friend class Passage;

  // A raw event that a stream of torch was told to wait for. It is released when that stream's host queue has been
  // emptied since: before, the wait may not have reached the device.
  struct Told {
    c10::Stream stream;
    size_t event;
  };
  std::vector<size_t> take_told(const c10::Stream& stream);
  // A pooled event that nobody else holds and no stream waits for.
  std::shared_ptr<c10::Event> asked_only(const c10::Stream& stream);

  const RustDevices* const core_;
  std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, int>, c10::Stream> side_;
  // Whether torch tells raw handles; unknown before the first try.
  std::optional<bool> native_;
  std::vector<Told> told_;
  // By device, the one that was given out first in front.
  std::map<c10::DeviceIndex, std::deque<std::shared_ptr<c10::Event>>> asked_only_;
};

}  // namespace sagellm
