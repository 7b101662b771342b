#include "device/vendor.hpp"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "device/watch.hpp"
#include "host/errors.hpp"
#include "host/python_host.hpp"
#include "host/slices.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

namespace {

DevicesOpened open(const RustGroup& group, c10::DeviceType type, const std::string& vendor, const std::string& library,
                   const std::vector<std::string>& folders) {
  std::vector<rust::String> places;
  places.reserve(folders.size());
  for (const std::string& folder : folders) places.push_back(rust::String::lossy(folder));
  return checked([&] {
    return group.open_devices(c10::DeviceTypeName(type, true), vendor, library, {places.data(), places.size()});
  });
}

}  // namespace

class VendorDevices::Exchange final : public IdExchange {
 public:
  explicit Exchange(const DeviceOwner& owner) : owner_(owner) {}

  void broadcast(rust::Slice<uint8_t> id) const override {
    share(id, [&](at::Tensor& bytes) { owner_.broadcast(bytes); });
  }
  void pass(rust::Slice<uint8_t> id, int32_t from, int32_t to) const override {
    share(id, [&](at::Tensor& bytes) { owner_.pass(bytes, from, to); });
  }

  // The exception that `broadcast` or `pass` threw. The core gets only its text.
  const std::exception_ptr& raised() const { return raised_; }

 private:
  template <class Function>
  void share(rust::Slice<uint8_t> id, const Function& hand_over) const {
    try {
      at::Tensor bytes = at::empty({static_cast<int64_t>(id.size())}, at::kByte);
      std::memcpy(bytes.data_ptr(), id.data(), id.size());
      hand_over(bytes);
      std::memcpy(id.data(), bytes.data_ptr(), id.size());
    } catch (const std::exception&) {
      raised_ = std::current_exception();
      throw;
    }
  }

  const DeviceOwner& owner_;
  mutable std::exception_ptr raised_;
};

VendorDevices::VendorDevices(DeviceOwner owner, c10::DeviceType type, const std::string& vendor,
                             const std::string& library, const std::vector<std::string>& folders)
    : owner_(std::move(owner)), type_(type), opened_(open(owner_.group, type, vendor, library, folders)) {}

template <class Function>
auto VendorDevices::exchanging(Function function) {
  const Exchange exchange(owner_);
  try {
    return function(exchange);
  } catch (const rust::Error& error) {
    if (exchange.raised()) std::rethrow_exception(exchange.raised());
    raise_coded(error.what());
  }
}

void VendorDevices::connect(c10::Device device) {
  const c10::DeviceGuard guard(device);
  exchanging([&](const IdExchange& exchange) { devices_->connect(device.index(), exchange); });
}

bool VendorDevices::can_split(c10::Device device, const std::vector<uint32_t>& ranks) {
  return checked([&] { return devices_->can_split(device.index(), slice(ranks)); });
}

void VendorDevices::split(c10::Device device, const std::vector<uint32_t>& ranks, VendorDevices* child) {
  const c10::DeviceGuard guard(device);
  checked([&] {
    child ? devices_->split(*child->devices_, device.index(), slice(ranks))
          : devices_->split_without_child(device.index(), slice(ranks));
  });
}

void VendorDevices::shrink_from(const RustRetired& old, c10::Device device, const std::vector<uint32_t>& excluded) {
  const c10::DeviceGuard guard(device);
  checked([&] { old.shrink(*devices_, slice(excluded)); });
}

std::vector<std::shared_ptr<c10::Event>> VendorDevices::come_behind_all(const c10::Stream& stream) const {
  std::vector<std::shared_ptr<c10::Event>> elsewhere;
  for (const auto& [other, ended] : last_->all()) {
    if (other == stream) continue;
    if (other.device() == stream.device()) {
      ended->block(stream);
    } else {
      elsewhere.push_back(ended);
    }
  }
  return elsewhere;
}

c10::intrusive_ptr<DeviceWork> VendorDevices::behind_all(bool by_itself) {
  const auto last = last_->all();
  if (last.empty()) return nullptr;
  const auto& [stream, ended] = *last.begin();
  DeviceWork::Launched made{stream, nullptr, ended, {}, stream};
  for (auto other = std::next(last.begin()); other != last.end(); ++other) made.earlier.push_back(other->second);
  made.blocks_host = true;
  made.failure = failure_;
  DeviceBegun begun = checked([&] { return devices_->begin_barrier(stream.device_index()); });
  made.known.timeout = std::chrono::milliseconds(begun.timeout_ms);
  made.call = shared_call(std::move(begun.call));
  auto work = DeviceWork::make(owner_.rank, c10d::OpType::BARRIER, Tensors(), owner_.events, nullptr, std::move(made));
  if (by_itself) work->watch();
  return work;
}

DeviceBegun VendorDevices::begin(c10::ArrayRef<Plan> calls, const Tensors& keep, c10::Device device, bool region,
                                 bool capturing) {
  const DeviceTerms terms{device.index(), region, capturing};
  const bool dense = std::all_of(keep.begin(), keep.end(), is_dense);
  c10::SmallVector<DeviceRequest, 1> requests;
  for (const Plan& call : calls) requests.push_back(request(call, dense));
  return exchanging([&](const IdExchange& exchange) { return devices_->begin(slice(requests), terms, exchange); });
}

std::shared_ptr<c10::Event> VendorDevices::put(c10::ArrayRef<Plan> calls, const rust::Vec<DeviceLowering>& lowerings,
                                               const CallPtr& call, const c10::Stream& callers, Passage& passage,
                                               Tensors& keep, bool asked_only) {
  try {
    c10::SmallVector<Preparation, 1> prepared;
    c10::SmallVector<DevicePlaced, 1> placed;
    for (const Plan& each : calls) {
      for (const Staged& staged : each.before) keep.push_back(staged.temporary);
      for (const Staged& staged : each.after) keep.push_back(staged.temporary);
    }
    c10::OptionalStreamGuard on;
    if (passage.stream() != callers) on.reset_stream(passage.stream());
    for (size_t i = 0; i < calls.size(); ++i) {
      copy_staged(calls[i].before, false);
      prepared.emplace_back(calls[i], lowerings[i], owner_.size, passage.device());
      placed.push_back(prepared.back().prepare(keep));
    }
    const size_t raw = passage.enter();
    // The watch lasts until all steps are enqueued. The first launch of one of torch's kernels may load the kernel, and
    // loading may wait until the device is idle. It then also waits for the library's kernel, which waits for other
    // ranks.
    const DeviceWatch::Launching watched(call, failure_);
    checked([&] { call->launch(slice(placed), raw); });
    passage.leave();
    for (size_t i = 0; i < calls.size(); ++i) {
      prepared[i].store();
      copy_staged(calls[i].after, true);
    }
    // One of these steps may have waited for a kernel of the library, and returned because the kernel was aborted. Only
    // this check reports the abort to the caller.
    if (failure_->followed()) {
      const std::string why = fault();
      // If a communicator is closed while calls are pending, these calls fail, but the group does not.
      raise_coded(why.empty() ? coded(ErrorKind::kAborted, "sagellm: the group's communicators were aborted") : why);
    }
    return passage.end(asked_only);
  } catch (const std::exception&) {
    // The library may still use this memory, and no event says when it is done, so the memory is leaked.
    new Tensors(std::move(keep));
    new auto(call);
    throw;
  }
}

c10::intrusive_ptr<DeviceWork> VendorDevices::follow(DeviceWork::Launched made, c10d::OpType type, Tensors outputs,
                                                     std::unique_ptr<Trace> trace, const Terms& terms) {
  const auto make = [&] {
    return DeviceWork::make(owner_.rank, type, std::move(outputs), owner_.events, std::move(trace), std::move(made));
  };
  if (terms.capturing) {
    const auto call = made.call;
    auto work = make();
    // The graph may be replayed at any time, and an event in it cannot be queried.
    failure_->captured();
    const std::lock_guard<std::mutex> lock(captured_mutex_);
    if (captured_.empty()) DeviceWatch::instance().add_captured(call, failure_);
    if (captured_.empty() || call->keeps_memory()) captured_.push_back(call);
    work->settle({});
    return work;
  }
  made.failure = failure_;
  made.under_way = Failure::UnderWay(failure_);
  if (!terms.listened && !made.blocks_host && !trace) {
    DeviceWatch::instance().add(std::make_shared<DeviceRun>(std::move(made), owner_.events));
    return nullptr;
  }
  auto work = make();
  work->watch();
  return work;
}

DeviceWork::Launched VendorDevices::launch(c10::ArrayRef<Plan> calls, const DeviceBegun& begun, const CallPtr& call,
                                           const c10::Stream& callers, Tensors keep, const Terms& terms) {
  // In a capture the call runs on the caller's stream, because the graph would lack work on another stream that does
  // not join the caller's again.
  const bool on_callers = !terms.async || terms.capturing;
  Passage passage = streams_.begin(callers, !on_callers, owner_.events->timing(), begun.stream_key);
  std::vector<std::shared_ptr<c10::Event>> elsewhere;
  if (terms.barrier) elsewhere = come_behind_all(passage.stream());
  // A synchronous call returns no Work if no hook is registered, so no stream waits for its end event. Only a later
  // barrier may wait for that event, and then `last_` holds it.
  std::shared_ptr<c10::Event> ended =
      put(calls, begun.lowerings, call, callers, passage, keep, !terms.listened && !terms.capturing);
  const bool counts = !terms.capturing && begun.stream_key == 0;
  if (counts) last_->put(passage.stream(), ended);
  // Memory that is freed on the caller's stream is reused only after the call, and a graph owns its memory. So nothing
  // need be kept.
  if (on_callers) keep.clear();
  DeviceWork::Launched made{passage.stream(), passage.begun(), std::move(ended), std::move(keep), callers};
  if (counts) made.last = last_;
  made.blocks_host = terms.barrier || (owner_.blocking_wait && !terms.capturing);
  made.earlier = std::move(elsewhere);
  made.op = calls[0].op;
  made.known = {begun.number, std::chrono::milliseconds(begun.timeout_ms)};
  made.call = call;
  return made;
}

c10::intrusive_ptr<DeviceWork> VendorDevices::submit(c10::ArrayRef<Plan> calls, const Label& label, Tensors keep,
                                                     Tensors outputs, c10::Device device, bool async, bool region) {
  DeferredRelease::instance().release();
  // torch's operators and the library launch kernels on the thread's current device.
  const c10::DeviceGuard guard(device);
  const c10::Stream callers = current_stream(device);
  Terms terms;
  terms.async = async;
  terms.capturing = is_capturing(callers);
  terms.barrier = calls[0].call.kind == Kind::kBarrier;
  terms.listened = async || owner_.events->has_work_hook() || owner_.events->has_completion_hooks();
  DeviceBegun begun = begin(calls, keep, device, region, terms.capturing);
  const auto call = shared_call(std::move(begun.call));
  c10::intrusive_ptr<DeviceWork> work;
  try {
    auto trace = Trace::start(label.title, keep);
    DeviceWork::Launched made = launch(calls, begun, call, callers, std::move(keep), terms);
    if (!terms.listened) outputs.clear();
    work = follow(std::move(made), label.type, std::move(outputs), std::move(trace), terms);
  } catch (const std::exception&) {
    call->failed_here(text_of(coded_text(std::current_exception())));
    // This thread gets the exception from this call, so the error is not raised in it again.
    owner_.events->told();
    failure_->follow(fault(), failure_->threads(), [call] { call->abort(); }, true);
    throw;
  }
  if (terms.listened) return work;
  if ((terms.barrier || owner_.blocking_wait) && !terms.capturing) work->wait(kNoTimeout);
  return nullptr;
}

bool VendorDevices::is_capturing(const c10::Stream& stream) const {
  // For a device type that is not torch's own, `false` may merely mean that the device's guard does not implement the
  // query.
  const std::optional<bool> told = capture_of(stream);
  if (told && (*told || type_ != c10::DeviceType::PrivateUse1)) return *told;
  void* raw = nullptr;
  try {
    raw = stream.native_handle();
  } catch (const c10::Error&) {
    return false;  // there is no raw stream to query
  }
  return checked([&] { return devices_->is_capturing(stream.device_index(), reinterpret_cast<size_t>(raw)); });
}

bool VendorDevices::drain(std::chrono::milliseconds timeout) {
  constexpr auto kPause = std::chrono::milliseconds(1);
  const bool bounded = timeout.count() > 0;
  const auto until = std::chrono::steady_clock::now() + timeout;
  // As long as the watching thread runs, each work ends at its deadline at the latest, and soon after the end of a
  // peer.
  bool lost = DeviceWatch::instance().stopped();
  for (int turn = 0; !lost && failure_->under_way() > 0; ++turn) {
    std::this_thread::sleep_for(kPause);
    lost = (bounded && std::chrono::steady_clock::now() >= until) || DeviceWatch::instance().stopped();
    if (turn % 16 == 0 && check_interrupt()) std::rethrow_exception(take_interrupt());
  }
  return !lost;
}

void VendorDevices::forget_captured() {
  // Destroyed after the lock is released.
  std::vector<CallPtr> captured;
  const std::lock_guard<std::mutex> lock(captured_mutex_);
  captured.swap(captured_);
}

void VendorDevices::abort() {
  forget_captured();
  failure_->deliberate(fault());
  devices_->abort();
}

void VendorDevices::close(std::chrono::milliseconds timeout) {
  // A forked child inherits neither the works nor the device.
  if (owner_.events->inherited()) return;
  const auto until = std::chrono::steady_clock::now() + timeout;
  // A work fails if its communicator ends before the work, so first wait for all works.
  bool drained = false;
  try {
    drained = drain(timeout);
  } catch (const std::exception&) {
    abort();
    throw;
  }
  forget_captured();
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
  const int64_t patience = timeout.count() > 0 ? std::max<int64_t>(left.count(), 1) : 0;
  if (devices_->close(static_cast<uint64_t>(patience), drained)) return;
  if (const auto raised = take_interrupt()) std::rethrow_exception(raised);
}

}  // namespace sagellm
