#include "device/vendor.hpp"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "c10d/backend.hpp"
#include "host/errors.hpp"
#include "host/python_host.hpp"
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

bool is(const Plan& plan, Kind kind) {
  return plan.call.kind == kind;
}

bool is_message(const Plan& plan) {
  return plan.call.kind >= Kind::kSend;
}

bool is_single_message(const std::vector<DevicePlan>& calls, bool region) {
  return !region && is_message(*calls[0].plan);
}

template <class Item>
rust::Slice<const Item> slice(const std::vector<Item>& items) {
  return {items.data(), items.size()};
}

}  // namespace

class VendorDevices::Exchange final : public IdExchange {
 public:
  using Share = std::function<void(at::Tensor& bytes, int from, int to)>;
  explicit Exchange(Share share) : share_(std::move(share)) {}

  void share(rust::Slice<uint8_t> id, int32_t from, int32_t to) const override {
    try {
      at::Tensor bytes = at::empty({static_cast<int64_t>(id.size())}, at::kByte);
      std::memcpy(bytes.data_ptr(), id.data(), id.size());
      share_(bytes, from, to);
      std::memcpy(id.data(), bytes.data_ptr(), id.size());
    } catch (const std::exception&) {
      raised_ = std::current_exception();
      throw;
    }
  }

  // What `share` threw, which the core only knows as text.
  const std::exception_ptr& raised() const { return raised_; }

 private:
  const Share share_;
  mutable std::exception_ptr raised_;
};

class VendorDevices::OnStream final : public DeviceCall {
 public:
  // `under_way` counts it from `DeviceWork::watch` on; null for what was captured, whose end nobody sees.
  OnStream(rust::Box<RustCall> core, std::shared_ptr<std::atomic<int64_t>> under_way)
      : core_(std::move(core)), under_way_(std::move(under_way)) {}

  void launch(const std::vector<Launch>& launches, void* stream) const {
    std::vector<DevicePlaced> placed;
    Pieces pieces;
    for (const Launch& each : launches) {
      placed.push_back({each.factor, each.send.size(), each.recv.size()});
      pieces.insert(pieces.end(), each.send.begin(), each.send.end());
      pieces.insert(pieces.end(), each.recv.begin(), each.recv.end());
    }
    checked([&] { core_->launch(slice(placed), slice(pieces), reinterpret_cast<size_t>(stream)); });
  }

  std::string poll(const std::function<bool()>& has_passed, bool& passed) override {
    const uint32_t mode = checked([&] { return core_->before_poll(); });
    try {
      passed = has_passed();
    } catch (const std::exception&) {
      (void)core_->poll(false, mode);
      throw;
    }
    return std::string(core_->poll(passed, mode));
  }

  void ended(bool well) override {
    core_->ended(well, under_way_ != nullptr);
    if (under_way_) under_way_->fetch_sub(1, std::memory_order_relaxed);
  }

  std::vector<Explanation> explain() const override {
    const rust::Vec<Explanation> found = core_->explain();
    return {found.begin(), found.end()};
  }

 private:
  const rust::Box<RustCall> core_;
  const std::shared_ptr<std::atomic<int64_t>> under_way_;
};

VendorDevices::VendorDevices(SageBackend& backend, c10::DeviceType type, const std::string& vendor,
                             const std::string& library, const std::vector<std::string>& folders)
    : backend_(backend),
      type_(type),
      opened_(open(*backend.group_, type, vendor, library, folders)),
      // Not owned: the streams are a member.
      streams_(std::make_unique<DeviceStreams>(std::shared_ptr<const RawStreams>(std::shared_ptr<void>(), this))) {}

void* VendorDevices::behind(c10::DeviceIndex device, int lane, void* event, const std::vector<void*>& told) const {
  std::vector<size_t> events;
  events.reserve(told.size());
  for (void* each : told) events.push_back(reinterpret_cast<size_t>(each));
  return reinterpret_cast<void*>(checked([&] {
    return devices_->raw_stream(RawStep::kBehind, device, reinterpret_cast<size_t>(event), lane, slice(events));
  }));
}

void* VendorDevices::mark(c10::DeviceIndex device, void* stream) const {
  return reinterpret_cast<void*>(
      checked([&] { return devices_->raw_stream(RawStep::kMark, device, reinterpret_cast<size_t>(stream), 0, {}); }));
}

uint64_t VendorDevices::group_timeout() const {
  return static_cast<uint64_t>(backend_.options_->timeout.count());
}

template <class Function>
auto VendorDevices::exchanging(Function function) {
  const Exchange exchange([this](at::Tensor& bytes, int from, int to) { backend_.share(bytes, from, to); });
  try {
    return function(exchange);
  } catch (const rust::Error& error) {
    if (exchange.raised()) std::rethrow_exception(exchange.raised());
    raise_coded(error.what());
  }
}

void VendorDevices::connect(c10::Device device) {
  const c10::DeviceGuard guard(device);
  DeviceTerms terms{};
  terms.device = device.index();
  terms.join_timeout_ms = group_timeout();
  exchanging([&](const IdExchange& exchange) { devices_->begin({}, terms, exchange); });
}

bool VendorDevices::can_split(c10::Device device, const std::vector<uint32_t>& ranks) {
  return checked([&] { return devices_->split(true, *devices_, false, device.index(), slice(ranks), 0); });
}

void VendorDevices::split(c10::Device device, const std::vector<uint32_t>& ranks, VendorDevices* child) {
  const c10::DeviceGuard guard(device);
  VendorDevices& made = child ? *child : *this;
  checked([&] {
    devices_->split(false, *made.devices_, child != nullptr, device.index(), slice(ranks), made.group_timeout());
  });
}

VendorDevices::Retired VendorDevices::retire(c10::Device device, bool drained) {
  return {device, devices_->retire(device.index(), drained)};
}

void VendorDevices::Retired::shrink(const std::vector<uint32_t>& excluded, VendorDevices& child) const {
  const c10::DeviceGuard guard(*device_);
  checked([&] { retired_->communicator->shrink(*child.devices_, slice(excluded), child.group_timeout()); });
}

void VendorDevices::copy_own_messages(const std::vector<DevicePlan>& calls, const std::vector<Launch>& launches,
                                      c10::Device device) const {
  Pieces sent;
  Pieces received;
  for (size_t i = 0; i < calls.size(); ++i) {
    const Plan& plan = *calls[i].plan;
    if (!is_message(plan) || plan.call.root != static_cast<uint32_t>(backend_.getRank())) continue;
    sent.insert(sent.end(), launches[i].send.begin(), launches[i].send.end());
    received.insert(received.end(), launches[i].recv.begin(), launches[i].recv.end());
  }
  const auto bytes = [&](const Piece& piece) {
    return at_address(piece.addr, {static_cast<int64_t>(piece.bytes)}, at::kByte, device);
  };
  for (size_t i = 0; i < sent.size(); ++i) copy_quietly(bytes(received[i]), bytes(sent[i]));
}

int VendorDevices::lane_of(const Plan& plan, bool region) const {
  if (region || !is_message(plan)) return 0;
  const int peer = static_cast<int>(plan.call.root);
  const int from = is(plan, Kind::kSend) ? backend_.getRank() : peer;
  const int to = is(plan, Kind::kSend) ? peer : backend_.getRank();
  return 1 + from * backend_.getSize() + to;
}

std::vector<std::shared_ptr<c10::Event>> VendorDevices::come_behind_all(const c10::Stream& stream) {
  std::vector<std::shared_ptr<c10::Event>> elsewhere;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [other, ended] : last_) {
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
  std::vector<std::pair<c10::Stream, std::shared_ptr<c10::Event>>> last;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    last = last_;
  }
  if (last.empty()) return nullptr;
  DeviceWork::Launched made{last[0].first, nullptr, last[0].second, {}};
  for (size_t i = 1; i < last.size(); ++i) made.earlier.push_back(last[i].second);
  made.blocks_host = true;
  made.watched.op = "barrier behind the collectives";
  made.watched.timeout = backend_.options_->timeout;
  made.call = std::make_shared<OnStream>(devices_->behind(last[0].first.device_index(), group_timeout()), nullptr);
  auto work = c10::make_intrusive<DeviceWork>(backend_.getRank(), c10d::OpType::BARRIER, Tensors(), backend_.events_,
                                              nullptr, std::move(made));
  if (by_itself) work->watch();
  return work;
}

void VendorDevices::is_last(const c10::Stream& stream, const std::shared_ptr<c10::Event>& ended) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = std::find_if(last_.begin(), last_.end(), [&](const auto& each) { return each.first == stream; });
  if (known == last_.end()) {
    last_.emplace_back(stream, ended);
  } else {
    known->second = ended;
  }
}

DeviceBegun VendorDevices::begin(const std::vector<DevicePlan>& calls, const Tensors& keep, c10::Device device,
                                 bool region, bool capturing) {
  const int64_t timeout = calls[0].plan->call.timeout_ms;
  DeviceTerms terms{};
  terms.device = device.index();
  terms.region = region;
  terms.capturing = capturing;
  terms.timeout_ms = timeout < 0 ? group_timeout() : static_cast<uint64_t>(timeout);
  terms.join_timeout_ms = group_timeout();
  const bool plain = std::all_of(keep.begin(), keep.end(), elements_in_order);
  std::vector<DeviceRequest> requests;
  requests.reserve(calls.size());
  for (const DevicePlan& call : calls) requests.push_back(request(*call.plan, plain));
  return exchanging([&](const IdExchange& exchange) { return devices_->begin(slice(requests), terms, exchange); });
}

std::shared_ptr<c10::Event> VendorDevices::put(const std::vector<DevicePlan>& calls,
                                               const rust::Vec<DeviceRecipe>& recipes,
                                               const std::shared_ptr<OnStream>& call, Passage& passage, Tensors& keep,
                                               bool region, bool asked_only) {
  const int ranks = is_single_message(calls, region) ? 2 : backend_.getSize();
  std::vector<Launch> launches;
  {
    const c10::StreamGuard on(passage.stream());
    for (size_t i = 0; i < calls.size(); ++i) {
      for (const Staged& each : calls[i].before) copy_quietly(each.temporary, each.tensor);
      launches.push_back(prepare(*calls[i].plan, recipes[i], ranks, passage.device(), keep));
    }
    if (region) copy_own_messages(calls, launches, passage.device());
  }
  void* raw = passage.enter();
  for (const DevicePlan& each : calls) {
    for (const Staged& staged : each.before) keep.push_back(staged.temporary);
    for (const Staged& staged : each.after) keep.push_back(staged.temporary);
  }
  try {
    call->launch(launches, raw);
    passage.leave();
    const c10::StreamGuard on(passage.stream());
    for (size_t i = 0; i < calls.size(); ++i) {
      if (launches[i].after) launches[i].after();
      for (const Staged& each : calls[i].after) copy_quietly(each.tensor, each.temporary);
    }
    return passage.end(asked_only);
  } catch (const std::exception&) {
    // The library may be at work on this memory, and nobody will know when it is done: it is never given back.
    new Tensors(std::move(keep));
    new auto(call);
    throw;
  }
}

c10::intrusive_ptr<DeviceWork> VendorDevices::follow(DeviceWork::Launched made, c10d::OpType type, Tensors outputs,
                                                     std::unique_ptr<Trace> trace, bool captured) {
  const auto call = made.call;
  auto work = c10::make_intrusive<DeviceWork>(backend_.getRank(), type, std::move(outputs), backend_.events_,
                                              std::move(trace), std::move(made));
  if (captured) {
    // The graph may be played at any time, and an event in it cannot be asked.
    new auto(call);
    work->settle();
    return work;
  }
  under_way_->fetch_add(1, std::memory_order_relaxed);
  try {
    work->watch();
  } catch (const std::exception&) {
    under_way_->fetch_sub(1, std::memory_order_relaxed);
    throw;
  }
  return work;
}

c10::intrusive_ptr<DeviceWork> VendorDevices::submit(std::vector<DevicePlan>& calls, const Label& label, Tensors keep,
                                                     Tensors outputs, c10::Device device, bool async, bool region) {
  Graveyard::instance().drain();
  // For torch's operators and for the library, whose kernels are launched on the thread's device.
  const c10::DeviceGuard guard(device);
  const bool capturing = is_capturing(current_stream(device));
  const Plan& first = *calls[0].plan;
  const bool barrier = is(first, Kind::kBarrier);
  DeviceBegun begun = begin(calls, keep, device, region, capturing);
  auto trace = Trace::start(label.title, keep);
  const auto call = std::make_shared<OnStream>(std::move(begun.call), capturing ? nullptr : under_way_);

  // A capture is joined before the call returns: what runs beside it would be lost.
  const bool on_callers = !async || capturing;
  Passage passage = streams_->begin(device, !on_callers, backend_.events_->timing(), lane_of(first, region));
  // A synchronous call has no Work where nobody listens, so no stream waits for its end but that of a barrier.
  const bool listened = async || backend_.has_listeners();
  std::vector<std::shared_ptr<c10::Event>> elsewhere;
  if (barrier) elsewhere = come_behind_all(passage.stream());
  std::shared_ptr<c10::Event> ended = put(calls, begun.recipes, call, passage, keep, region, !listened && !capturing);
  if (!capturing && !is_single_message(calls, region)) is_last(passage.stream(), ended);

  // What is given back on the caller's stream is used again behind the call, and a graph owns its memory.
  if (on_callers) keep.clear();
  if (!listened) outputs.clear();
  DeviceWork::Launched made{passage.stream(), passage.begun(), std::move(ended), std::move(keep)};
  made.blocks_host = barrier;
  made.earlier = std::move(elsewhere);
  made.watched.op = first.op;
  made.watched.number = begun.number;
  made.watched.timeout =
      first.call.timeout_ms < 0 ? backend_.options_->timeout : std::chrono::milliseconds(first.call.timeout_ms);
  made.call = call;
  auto work = follow(std::move(made), label.type, std::move(outputs), std::move(trace), capturing);
  if (listened) return work;
  if (barrier && !capturing) work->wait(kNoTimeout);
  return nullptr;
}

bool VendorDevices::is_capturing(const c10::Stream& stream) const {
  // The "no" of a device that is not torch's own may only mean that its guard does not say.
  const std::optional<bool> told = capture_of(stream);
  if (told && (*told || type_ != c10::DeviceType::PrivateUse1)) return *told;
  void* raw = nullptr;
  try {
    raw = stream.native_handle();
  } catch (const c10::Error&) {
    return false;  // nothing can be asked
  }
  return checked([&] {
    return devices_->raw_stream(RawStep::kCapturing, stream.device_index(), reinterpret_cast<size_t>(raw), 0, {}) != 0;
  });
}

bool VendorDevices::drain(std::chrono::milliseconds timeout) {
  constexpr auto kPause = std::chrono::milliseconds(1);
  const bool bounded = timeout.count() > 0;
  const auto until = std::chrono::steady_clock::now() + timeout;
  // Each work ends at its deadline at the latest, and soon where a peer is gone; unless nobody looks any more.
  bool lost = DeviceWatch::instance().stopped();
  for (int turn = 0; !lost && under_way_->load(std::memory_order_relaxed) > 0; ++turn) {
    std::this_thread::sleep_for(kPause);
    lost = (bounded && std::chrono::steady_clock::now() >= until) || DeviceWatch::instance().stopped();
    if (turn % 16 == 0 && check_interrupt()) std::rethrow_exception(take_interrupt());
  }
  return !lost;
}

void VendorDevices::close(std::chrono::milliseconds timeout) {
  // A child that was forked has neither the works nor a device.
  if (::getpid() != process_) return;
  const auto until = std::chrono::steady_clock::now() + timeout;
  // A work whose communicator was shut under it would fail.
  bool drained = false;
  try {
    drained = drain(timeout);
  } catch (const std::exception&) {
    abort();
    throw;
  }
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
  const int64_t patience = timeout.count() > 0 ? std::max<int64_t>(left.count(), 1) : 0;
  if (devices_->leave(Leave::kInOrder, static_cast<uint64_t>(patience), drained)) return;
  if (const auto raised = take_interrupt()) std::rethrow_exception(raised);
}

}  // namespace sagellm
