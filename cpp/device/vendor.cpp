#include "device/vendor.hpp"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "c10d/backend.hpp"
#include "host/errors.hpp"
#include "host/python_host.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

namespace {

// How often a library is asked for errors, and the group for dead peers, while works are under way.
constexpr auto kAskEvery = std::chrono::milliseconds(10);

// How long what a peer has sent may take to arrive after the peer itself is gone.
constexpr auto kOnItsWay = std::chrono::milliseconds(500);

// The device that this thread's calls on raw streams are for: `set_device` comes before each.
thread_local c10::DeviceIndex thread_device = 0;

template <class Function>
auto checked(Function function) {
  try {
    return function();
  } catch (const rust::Error& error) {
    raise(error.what());
  }
}

rust::Box<RustDevices> open(const RustGroup& group, c10::DeviceType type, const std::string& vendor,
                            const std::string& library, const std::vector<std::string>& folders) {
  std::vector<rust::String> places;
  places.reserve(folders.size());
  for (const std::string& folder : folders) places.push_back(rust::String::lossy(folder));
  return checked([&] {
    return group.open_devices(c10::DeviceTypeName(type, true), vendor, library, {places.data(), places.size()});
  });
}

bool is_message(const Plan& plan) {
  return plan.call.kind >= static_cast<uint8_t>(Kind::kSend);
}

size_t bytes_of(c10::ArrayRef<Piece> pieces) {
  size_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

// What the statistics are told of a call.
Foreign foreign(const Plan& plan) {
  Foreign call{};
  call.kind = plan.call.kind;
  call.root = plan.call.root;
  call.tag = plan.call.tag;
  call.read = bytes_of(plan.inputs());
  call.written = bytes_of(plan.outputs());
  call.tensors = plan.call.tensors;
  call.element = plan.call.element;
  call.site = plan.call.site;
  call.device = true;
  return call;
}

rust::Box<RustLaunched> exchange(const rust::Box<RustMember>& core, const std::vector<uint32_t>& peers,
                                 const std::vector<bool>& sends, const std::vector<Piece>& pieces, size_t stream) {
  const auto flags = std::make_unique<bool[]>(sends.size());
  std::copy(sends.begin(), sends.end(), flags.get());
  return core->exchange({peers.data(), peers.size()}, {flags.get(), sends.size()}, {pieces.data(), pieces.size()},
                        stream);
}

}  // namespace

VendorDevices::VendorDevices(SageBackend& backend, c10::DeviceType type, const std::string& vendor,
                             const std::string& library, const std::vector<std::string>& folders)
    : backend_(backend),
      type_(type),
      group_(backend.options_->group_name),
      ranks_(backend.getSize()),
      devices_(open(*backend.group_, type, vendor, library, folders)),
      // Not owned: the streams are a member.
      streams_(std::make_unique<DeviceStreams>(std::shared_ptr<const RawStreams>(std::shared_ptr<void>(), this))) {}

void VendorDevices::set_device(c10::DeviceIndex device) const {
  thread_device = device;
  checked([&] { devices_->set_device(device); });
}

void* VendorDevices::stream(c10::DeviceIndex device, int lane) const {
  return reinterpret_cast<void*>(checked([&] { return devices_->raw_stream(device, lane); }));
}

void VendorDevices::wait(void* stream, void* event) const {
  checked([&] { devices_->raw_wait(reinterpret_cast<size_t>(stream), reinterpret_cast<size_t>(event)); });
}

void* VendorDevices::record(void* stream) const {
  return reinterpret_cast<void*>(
      checked([&] { return devices_->raw_record(thread_device, reinterpret_cast<size_t>(stream)); }));
}

void VendorDevices::release(void* event) const {
  devices_->raw_release(thread_device, reinterpret_cast<size_t>(event));
}

VendorDevices::MemberPtr VendorDevices::member(const Key& key) {
  const auto known = [&]() -> MemberPtr {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = members_.find(key);
    return found == members_.end() ? nullptr : found->second;
  };
  if (MemberPtr found = known()) return found;
  const std::lock_guard<std::mutex> making(making_);
  if (MemberPtr found = known()) return found;
  const auto& [device, from, to] = key;
  if (from < 0) {
    add(key);
  } else {
    connect_pair(device, from == backend_.getRank() ? to : from);
  }
  return known();
}

void VendorDevices::connect_pair(c10::DeviceIndex device, int peer) {
  const int rank = backend_.getRank();
  if (!store_) store_ = wrap_store(backend_.store_);
  std::vector<uint32_t> known;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& each : members_) {
      const auto& [index, from, to] = each.first;
      // The later one of a pair's two.
      if (index == device && from == rank && members_.count({device, to, rank}) != 0) {
        known.push_back(static_cast<uint32_t>(to));
      }
    }
  }
  const auto timeout = static_cast<uint64_t>(backend_.options_->timeout.count());
  const auto begin = std::chrono::steady_clock::now();
  for (int next = -1; next != peer;) {
    const rust::Slice<const uint32_t> others{known.data(), known.size()};
    const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
    next = static_cast<int>(checked([&] {
      return devices_->next_pair(store_, static_cast<uint32_t>(peer), others, static_cast<uint64_t>(passed.count()),
                                 timeout);
    }));
    // Two ranks may both begin with a send: whoever makes one direction makes the other, in an order of both.
    add({device, std::min(rank, next), std::max(rank, next)});
    add({device, std::max(rank, next), std::min(rank, next)});
    known.push_back(static_cast<uint32_t>(next));
  }
}

void VendorDevices::add(const Key& key) {
  MemberPtr made = make(key);
  const std::lock_guard<std::mutex> lock(mutex_);
  members_.emplace(key, std::move(made));
}

VendorDevices::MemberPtr VendorDevices::make(const Key& key) {
  const auto& [device, from, to] = key;
  const int rank = backend_.getRank();
  const bool all = from < 0;
  const int first = all ? 0 : std::min(from, to);
  const bool leads = rank == first;
  const auto timeout = static_cast<uint64_t>(backend_.options_->timeout.count());
  // Some libraries make not even an id on a thread without a device.
  const c10::DeviceGuard guard(c10::Device(type_, device));
  set_device(device);
  at::Tensor bytes = at::empty({static_cast<int64_t>(devices_->id_bytes())}, at::kByte);
  if (leads) {
    const rust::Vec<uint8_t> id = checked([&] { return devices_->unique_id(); });
    std::copy(id.begin(), id.end(), bytes.data_ptr<uint8_t>());
  }
  if (backend_.getSize() > 1) backend_.share(bytes, all ? -1 : first, all ? -1 : std::max(from, to));
  const auto ranks = static_cast<uint32_t>(all ? backend_.getSize() : 2);
  const auto own = static_cast<uint32_t>(all ? rank : leads ? 0 : 1);
  const rust::Slice<const uint8_t> id{bytes.data_ptr<uint8_t>(), static_cast<size_t>(bytes.numel())};
  const std::string whose = all ? "all" : c10::str(from, "-", to);
  return std::make_shared<Member>(checked([&] { return devices_->join(whose, id, device, own, ranks, timeout); }));
}

VendorDevices::MemberPtr VendorDevices::living(c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = members_.find({device.index(), -1, -1});
  return found == members_.end() || found->second->aborted ? nullptr : found->second;
}

void VendorDevices::adopt(c10::Device device, rust::Box<RustMember> made) {
  auto member = std::make_shared<Member>(std::move(made));
  const std::lock_guard<std::mutex> lock(mutex_);
  members_.emplace(Key{device.index(), -1, -1}, std::move(member));
}

bool VendorDevices::can_split(c10::Device device, const std::vector<uint32_t>& ranks) {
  const MemberPtr member = living(device);
  return member && member->core->can_split({ranks.data(), ranks.size()});
}

void VendorDevices::split(c10::Device device, const std::vector<uint32_t>& ranks, VendorDevices* child) {
  const MemberPtr member = living(device);
  if (!member) raise("Asagellm split: the communicator of the group was aborted");
  const rust::Slice<const uint32_t> members{ranks.data(), ranks.size()};
  const c10::DeviceGuard guard(device);
  set_device(device.index());
  const auto timeout = [](const SageBackend& group) { return static_cast<uint64_t>(group.options_->timeout.count()); };
  checked([&] {
    if (!child) return member->core->stay_out(members, timeout(backend_));
    child->adopt(device, member->core->split(*child->devices_, members, timeout(child->backend_)));
  });
}

VendorDevices::Retired VendorDevices::retire(c10::Device device, bool drained) {
  MemberPtr member = living(device);
  if (member && drained) member->drained = true;
  if (member && member->aborted.exchange(true)) member.reset();
  return {device, std::move(member)};
}

VendorDevices::Retired::~Retired() {
  if (member_) member_->core->abort();
}

void VendorDevices::Retired::shrink(const std::vector<uint32_t>& excluded, VendorDevices& child) const {
  const c10::DeviceGuard guard(*device_);
  child.set_device(device_->index());
  checked([&] {
    const auto timeout = static_cast<uint64_t>(child.backend_.options_->timeout.count());
    child.adopt(*device_, member_->core->shrink(*child.devices_, {excluded.data(), excluded.size()}, timeout));
  });
}

class VendorDevices::OnStream final : public DeviceCall {
 public:
  OnStream(std::shared_ptr<const VendorDevices> devices, MemberPtr member, uint64_t number, bool counted)
      : devices_(std::move(devices)), member_(std::move(member)), number_(number), counted_(counted) {}

  void ended(bool well) override {
    for (const auto& note : notes) note->ended(well, counted_);
    if (counted_) devices_->under_way_->fetch_sub(1, std::memory_order_relaxed);
  }

  std::vector<std::string> explain() const override {
    std::vector<std::string> all;
    for (const Told& each : told) {
      std::string why(each.recipe->why());
      if (why.empty()) why = "one call of the library, which chooses the algorithm";
      if (each.tensors > 1) why += c10::str("; ", each.tensors, " tensors in one call");
      if (told.size() > 1) why += c10::str("; one of ", told.size(), " calls issued together");
      std::string lines = c10::str("op\t", each.op, "\nbytes\t", each.bytes, "\nranks\t", devices_->ranks_,
                                   "\nsequence\t", number_, "\nlibrary\t", devices_->describe(), "\ndecided\t", why);
      const std::string ran(member_->core->ran(each.kind, each.bytes));
      if (!ran.empty()) lines += "\nran\t" + ran;
      all.push_back(std::move(lines));
    }
    return all;
  }

  struct Told {
    const char* op;
    uint8_t kind;
    uint32_t tensors;
    uint64_t bytes;
    rust::Box<RustRecipe> recipe;
  };
  // Filled while the call is issued.
  c10::SmallVector<rust::Box<RustForeign>, 1> notes;
  Launched launched;
  c10::SmallVector<Told, 1> told;

 private:
  const std::shared_ptr<const VendorDevices> devices_;
  const MemberPtr member_;
  const uint64_t number_;
  // Watched, so that `under_way_` counts it and its end is seen.
  const bool counted_;
};

void VendorDevices::launch(c10::ArrayRef<Launch> launches, const Member& member, void* raw, Launched& launched) const {
  const auto stream = reinterpret_cast<size_t>(raw);
  if (launches.size() == 1) {
    launched.push_back(launches[0].on(member.core, stream));
    return;
  }
  // Messages under way together cannot wait for one another, whatever their order on the ranks.
  std::vector<uint32_t> peers;
  std::vector<bool> sends;
  std::vector<Piece> pieces;
  member.core->start_group();
  try {
    for (const Launch& each : launches) {
      if (!each.is_message()) {
        launched.push_back(each.on(member.core, stream));
        continue;
      }
      if (is_own_message(each)) continue;
      for (const auto* list : {&each.send, &each.recv}) {
        for (const Piece& piece : *list) {
          peers.push_back(each.root);
          sends.push_back(list == &each.send);
          pieces.push_back(piece);
        }
      }
    }
    if (!peers.empty()) launched.push_back(exchange(member.core, peers, sends, pieces, stream));
  } catch (const rust::Error&) {
    // A group that stays open swallows whatever this thread calls next.
    member.core->end_group();
    throw;
  }
  member.core->end_group();
}

bool VendorDevices::is_own_message(const Launch& launch) const {
  return launch.is_message() && launch.root == static_cast<uint32_t>(backend_.getRank());
}

void VendorDevices::check_own_messages(const std::vector<DevicePlan>& calls) const {
  std::vector<size_t> sent;
  std::vector<size_t> received;
  for (const DevicePlan& call : calls) {
    const Plan& plan = *call.plan;
    if (!is_message(plan) || plan.call.root != static_cast<uint32_t>(backend_.getRank())) continue;
    const bool sends = plan.call.kind == static_cast<uint8_t>(Kind::kSend);
    (sends ? sent : received).push_back(bytes_of(sends ? plan.inputs() : plan.outputs()));
  }
  if (sent == received) return;
  value_error("batch_isend_irecv",
              c10::str("rank ", backend_.getRank(), " sends itself messages of ", c10::ArrayRef<size_t>(sent),
                       " bytes, and receives ", c10::ArrayRef<size_t>(received),
                       " from itself in the same batch; expected equal lists"));
}

void VendorDevices::copy_own_messages(c10::ArrayRef<Launch> launches, c10::Device device) const {
  std::vector<Piece> sent;
  std::vector<Piece> received;
  for (const Launch& each : launches) {
    if (!is_own_message(each)) continue;
    sent.insert(sent.end(), each.send.begin(), each.send.end());
    received.insert(received.end(), each.recv.begin(), each.recv.end());
  }
  const auto bytes = [&](const Piece& piece) {
    return at_address(piece.addr, {static_cast<int64_t>(piece.bytes)}, at::kByte, device);
  };
  for (size_t i = 0; i < sent.size(); ++i) copy_quietly(bytes(received[i]), bytes(sent[i]));
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
  MemberPtr member;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    last = last_;
    if (last.empty()) return nullptr;
    const auto found = members_.find({last[0].first.device_index(), -1, -1});
    if (found == members_.end()) return nullptr;  // it has ended, and so have its operations
    member = found->second;
  }
  DeviceWork::Launched made{last[0].first, nullptr, last[0].second, {}};
  for (size_t i = 1; i < last.size(); ++i) made.earlier.push_back(last[i].second);
  made.blocks_host = true;
  made.guardian = shared_from_this();
  made.watched.op = "barrier behind the collectives";
  made.watched.number = last_number_.load(std::memory_order_relaxed);
  made.watched.device = last[0].first.device();
  made.watched.timeout = backend_.options_->timeout;
  made.watched.member = member;
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

c10::intrusive_ptr<DeviceWork> VendorDevices::submit(std::vector<DevicePlan>& calls, const Label& label, Tensors keep,
                                                     Tensors outputs, c10::Device device, bool async, bool region) {
  Graveyard::instance().drain();
  // For torch's operators and for the library, whose kernels are launched on the thread's device.
  const c10::DeviceGuard guard(device);
  const c10::Stream callers = current_stream(device);
  const bool capturing = is_capturing(callers);
  const Plan& first = *calls[0].plan;
  const bool message = is_message(first);
  const bool barrier = first.call.kind == static_cast<uint8_t>(Kind::kBarrier);
  const bool single_message = !region && message;
  const int ranks = single_message ? 2 : backend_.getSize();

  // Refused before anything is sent.
  if (capturing && barrier) {
    value_error(first.op,
                c10::str("the current stream of ", device,
                         " is being captured into a graph, which cannot hold a barrier: the host waits for it; "
                         "call it outside of the capture"));
  }
  if (region) check_own_messages(calls);
  c10::SmallVector<rust::Box<RustRecipe>, 1> recipes;
  const bool plain = std::all_of(keep.begin(), keep.end(), elements_in_order);
  for (const DevicePlan& call : calls) {
    const DeviceAsked wanted = asked(*call.plan, ranks, plain);
    recipes.push_back(checked([&] { return devices_->recipe(wanted); }));
  }
  Key key{device.index(), -1, -1};
  int lane = 0;
  if (single_message) {
    const int peer = static_cast<int>(first.call.root);
    const bool sends = first.call.kind == static_cast<uint8_t>(Kind::kSend);
    const int from = sends ? backend_.getRank() : peer;
    const int to = sends ? peer : backend_.getRank();
    key = {device.index(), from, to};
    // A message waits for its peer, who may wait for one in the other direction first.
    lane = 1 + from * backend_.getSize() + to;
  }
  if (capturing) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (members_.count(key) == 0) {
      value_error(first.op, c10::str("the current stream of ", device,
                                     " is being captured into a graph, and the group has no communicator for it yet; "
                                     "make one such call before the capture"));
    }
  }
  const MemberPtr communicator = member(key);
  uint64_t number = 0;
  c10::SmallVector<rust::Box<RustForeign>, 1> notes;
  for (const DevicePlan& call : calls) {
    if (call.plan->call.counts || number == 0)
      number = checked([&] { return devices_->next_number(call.plan->call.kind); });
    notes.push_back(backend_.group_->foreign(foreign(*call.plan)));
  }
  auto trace = Trace::start(label.title, keep);

  // A capture is joined before the call returns: what runs beside it would be lost.
  const bool on_callers = !async || capturing;
  Passage passage = streams_->begin(device, !on_callers, backend_.events_->timing(), lane);
  // A synchronous call has no Work where nobody listens, so no stream waits for its end but that of a barrier.
  const bool listened = async || backend_.has_listeners();
  std::vector<std::shared_ptr<c10::Event>> elsewhere;
  if (barrier) elsewhere = come_behind_all(passage.stream());
  c10::SmallVector<Launch, 1> launches;
  {
    const c10::StreamGuard on(passage.stream());
    for (size_t i = 0; i < calls.size(); ++i) {
      for (const Staged& each : calls[i].before) copy_quietly(each.temporary, each.tensor);
      launches.push_back(prepare(*calls[i].plan, std::move(recipes[i]), ranks, device, keep));
      // In a pair the lower rank is 0.
      if (single_message) launches.back().root = static_cast<int>(first.call.root) < backend_.getRank() ? 0 : 1;
    }
    if (region) copy_own_messages(launches, device);
  }
  const auto call = std::make_shared<OnStream>(shared_from_this(), communicator, number, !capturing);
  call->notes = std::move(notes);
  void* raw = passage.enter();
  std::shared_ptr<c10::Event> ended;
  for (const DevicePlan& each : calls) {
    for (const Staged& staged : each.before) keep.push_back(staged.temporary);
    for (const Staged& staged : each.after) keep.push_back(staged.temporary);
  }
  try {
    checked([&] { launch(launches, *communicator, raw, call->launched); });
    passage.leave();
    const c10::StreamGuard on(passage.stream());
    for (size_t i = 0; i < calls.size(); ++i) {
      if (launches[i].after) launches[i].after();
      for (const Staged& each : calls[i].after) copy_quietly(each.tensor, each.temporary);
    }
    ended = passage.end(!listened && !capturing);
  } catch (const std::exception&) {
    // The library may be at work on this memory, and nobody will know when it is done: it is never given back.
    new Tensors(std::move(keep));
    new auto(call);
    throw;
  }
  if (!capturing && !single_message) is_last(passage.stream(), ended);
  if (number != 0) last_number_.store(number, std::memory_order_relaxed);
  for (size_t i = 0; i < calls.size(); ++i) {
    const Plan& plan = *calls[i].plan;
    call->told.push_back({plan.op, plan.call.kind, plan.call.tensors,
                          std::max(bytes_of(plan.inputs()), bytes_of(plan.outputs())), std::move(launches[i].recipe)});
  }

  // What is given back on the caller's stream is used again behind the call, and a graph owns its memory.
  if (on_callers) keep.clear();
  if (!listened) outputs.clear();
  DeviceWork::Launched made{passage.stream(), passage.begun(), std::move(ended), std::move(keep)};
  made.blocks_host = barrier;
  made.earlier = std::move(elsewhere);
  made.guardian = shared_from_this();
  made.watched.op = first.op;
  made.watched.number = number;
  if (message) made.watched.peer = static_cast<int64_t>(first.call.root);
  made.watched.with_peer_alone = single_message;
  made.watched.device = device;
  made.watched.timeout =
      first.call.timeout_ms < 0 ? backend_.options_->timeout : std::chrono::milliseconds(first.call.timeout_ms);
  made.watched.member = communicator;
  made.call = call;
  auto work = c10::make_intrusive<DeviceWork>(backend_.getRank(), label.type, std::move(outputs), backend_.events_,
                                              std::move(trace), std::move(made));
  if (capturing) {
    // The graph may be played at any time, and an event in it cannot be asked.
    new auto(call);
    work->settle();
    return listened ? work : nullptr;
  }
  under_way_->fetch_add(1, std::memory_order_relaxed);
  try {
    work->watch();
  } catch (const std::exception&) {
    under_way_->fetch_sub(1, std::memory_order_relaxed);
    throw;
  }
  if (listened) return work;
  if (barrier) work->wait(kNoTimeout);
  return nullptr;
}

bool VendorDevices::ask(c10::DeviceIndex device, const std::function<bool()>& question) {
  const uint32_t before = checked([&] { return devices_->spare_captures(device); });
  try {
    const bool answer = question();
    checked([&] { devices_->capture_as_before(before); });
    return answer;
  } catch (const std::exception&) {
    checked([&] { devices_->capture_as_before(before); });
    throw;
  }
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
  set_device(stream.device_index());
  return checked([&] { return devices_->capturing(reinterpret_cast<size_t>(raw)); });
}

std::string VendorDevices::look(const Watched& watched, bool passed) {
  const auto member = std::static_pointer_cast<Member>(watched.member);
  const auto now = std::chrono::steady_clock::now();
  const int64_t only = watched.with_peer_alone ? watched.peer : -1;
  std::string trouble;
  if (!passed && watched.timeout.count() > 0 && now - watched.issued > watched.timeout) {
    trouble =
        std::string(devices_->stall(watched.what(), watched.number, static_cast<uint64_t>(watched.timeout.count())));
  } else if (member->aborted) {
    if (passed && member->drained) return {};
    trouble = std::string(devices_->trouble(watched.what(), only));
    if (trouble.empty()) trouble = c10::str("Asagellm: ", watched.what(), ": the communicator was aborted");
  } else {
    const std::string bad(member->core->poll());
    // Whoever has left since did so after its part.
    if (passed && bad.empty()) return {};
    if (bad.empty()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (now - asked_ < kAskEvery) return {};
      asked_ = now;
    }
    trouble = std::string(devices_->trouble(watched.what(), only));
    // A library may notice a dead peer before the kernel tells of it, and does not know which.
    for (int turn = 0; turn < 50 && trouble.empty() && !bad.empty(); ++turn) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      trouble = std::string(devices_->trouble(watched.what(), only));
    }
    if (trouble.empty() && !bad.empty()) {
      trouble = c10::str(bad, "; seen at ", watched.what());
      // The library tells it once, and every work and later call shall say it.
      devices_->fail(trouble.substr(1));
    }
    if (!trouble.empty() && bad.empty()) {
      // A peer may leave right after its last operation, and what it has sent is still on its way.
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!trouble_since_) trouble_since_ = now;
      if (now - *trouble_since_ < kOnItsWay) return {};
    }
  }
  if (!trouble.empty()) abort();
  return trouble;
}

void VendorDevices::abort() {
  std::map<Key, MemberPtr> members;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    members = members_;
  }
  for (const auto& each : members) {
    if (!each.second->aborted.exchange(true)) each.second->core->abort();
  }
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
  constexpr auto kForEver = std::chrono::milliseconds(std::chrono::hours(24 * 365));
  const bool bounded = timeout.count() > 0;
  const auto until = std::chrono::steady_clock::now() + timeout;
  // A work whose communicator was shut under it would fail.
  bool ended = false;
  try {
    ended = drain(timeout);
  } catch (const std::exception&) {
    abort();
    throw;
  }
  if (!ended || !devices_->trouble("the end of the group", -1).empty()) abort();
  std::map<Key, MemberPtr> members;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    members.swap(members_);
  }
  // In one order on all ranks, so that nobody waits in a circle.
  bool interrupted = false;
  for (const auto& each : members) {
    if (each.second->aborted.exchange(true)) continue;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    const auto patience = bounded ? std::max(left, std::chrono::milliseconds(1)) : kForEver;
    if (interrupted) {
      each.second->core->abort();
    } else {
      interrupted = !each.second->core->close(static_cast<uint64_t>(patience.count()));
    }
  }
  if (interrupted) {
    if (const auto raised = take_interrupt()) std::rethrow_exception(raised);
  }
}

}  // namespace sagellm
