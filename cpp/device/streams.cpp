#include "device/streams.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <iterator>

#include "host/errors.hpp"

namespace sagellm {

namespace {

c10::impl::VirtualGuardImpl guard_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

// Flushes the queue that some devices keep on the host in front of the stream. torch's own device types have no such
// queue, and their streams must not be queried while they are captured.
void drain(const c10::Stream& stream) {
  if (stream.device_type() == c10::DeviceType::PrivateUse1) (void)guard_of(stream.device()).queryStream(stream);
}

}  // namespace

c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : guard_of(device).getDevice();
}

c10::Stream current_stream(c10::Device device) {
  return guard_of(device).getStream(device);
}

std::optional<bool> capture_of(const c10::Stream& stream) {
  return guard_is_capturing(guard_of(stream.device()), stream, 0);
}

Passage::Passage(DeviceStreams& owner, c10::Stream stream, bool timed, int stream_key)
    : owner_(owner), stream_(stream), timed_(timed), stream_key_(stream_key) {
  if (!timed_) return;
  begun_ = std::make_shared<c10::Event>(stream_.device_type(), c10::EventFlag::BACKEND_DEFAULT);
  begun_->record(stream_);
}

size_t Passage::enter() {
  std::unique_lock<std::mutex> lock(owner_.mutex_);
  if (owner_.native_.value_or(true)) {
    try {
      void* const native = stream_.native_handle();
      owner_.native_ = true;
      lock.unlock();
      drain(stream_);
      return reinterpret_cast<size_t>(native);
    } catch (const c10::Error&) {
      if (owner_.native_) throw;
      owner_.native_ = false;
    }
  }
  lock.unlock();
  c10::Event here(stream_.device_type());
  here.record(stream_);
  // `drain` empties the stream's queue on the host. Then every wait that was queued has reached the device, so the core
  // may reuse the events of these waits.
  const std::vector<size_t> told = owner_.take_told(stream_);
  drain(stream_);
  own_raw_ = checked([&] {
    const auto event = reinterpret_cast<size_t>(here.eventId());
    return owner_.core_->stream_behind(device().index(), stream_key_, event, {told.data(), told.size()});
  });
  return own_raw_;
}

void Passage::leave() {
  if (own_raw_ == 0) return;
  const size_t event = checked([&] { return owner_.core_->record_event(device().index(), own_raw_); });
  guard_of(device()).block(reinterpret_cast<void*>(event), stream_);
  const std::lock_guard<std::mutex> lock(owner_.mutex_);
  owner_.told_.push_back({stream_, event});
}

std::shared_ptr<c10::Event> Passage::end(bool asked_only) {
  if (asked_only && !timed_) {
    auto ended = owner_.asked_only(stream_);
    ended->record(stream_);
    return ended;
  }
  auto ended = std::make_shared<c10::Event>(stream_.device_type(),
                                            timed_ ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
  ended->record(stream_);
  return ended;
}

c10::Stream DeviceStreams::side(c10::Device device, int stream_key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = side_.find({device.index(), stream_key});
  if (found != side_.end()) return found->second;
  c10::Stream made = current_stream(device);
  try {
    made = guard_of(device).getStreamFromGlobalPool(device, false);
  } catch (const c10::Error&) {
    made = c10::Stream(c10::Stream::DEFAULT, device);
  }
  side_.emplace(std::make_pair(device.index(), stream_key), made);
  return made;
}

Passage DeviceStreams::begin(const c10::Stream& callers, bool async, bool timed, int stream_key) {
  if (!async) return Passage(*this, callers, timed, stream_key);
  const c10::Stream ours = side(callers.device(), stream_key);
  if (ours != callers) {
    c10::Event now(callers.device_type());
    now.record(callers);
    now.block(ours);
  }
  return Passage(*this, ours, timed, stream_key);
}

std::shared_ptr<c10::Event> DeviceStreams::asked_only(const c10::Stream& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Largest number of events of a device in the pool. If there are more, the oldest event leaves the pool.
  constexpr size_t kMost = 1024;
  auto& events = asked_only_[stream.device_index()];
  const bool free = !events.empty() && events.front().use_count() == 1;
  // Pairs with the release by which the last other holder dropped its reference to the event.
  if (free) std::atomic_thread_fence(std::memory_order_acquire);
  events.push_back(free ? events.front() : std::make_shared<c10::Event>(stream.device_type()));
  if (free || events.size() > kMost) events.pop_front();
  return events.back();
}

std::vector<size_t> DeviceStreams::take_told(const c10::Stream& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto others =
      std::stable_partition(told_.begin(), told_.end(), [&](const Told& each) { return each.stream != stream; });
  std::vector<size_t> taken;
  std::transform(others, told_.end(), std::back_inserter(taken), [](const Told& each) { return each.event; });
  told_.erase(others, told_.end());
  return taken;
}

}  // namespace sagellm
