// Tensors on a device, carried by its vendor's library.
//
// A call on such tensors is lowered like one on the CPU (`HostCall`): its pieces are addresses on the device. What is
// left to do here: where the library must get something else than what lies in the caller's memory (another type,
// scaled, several tensors behind each other), make it on the communication stream (device/recipe.hpp); give the library
// its calls on a raw stream; and follow the work to its end, which may be a deadline or a dead peer.
#pragma once

#include <unistd.h>

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "device/recipe.hpp"
#include "device/streams.hpp"
#include "device/work.hpp"
#include "lower/plan.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

class SageBackend;

// A call that was lowered: the pieces of `plan` are addresses on the device. Temporaries stand for tensors of the
// caller that are not contiguous, or that overlap others: filled before the call, copied back after it.
struct DevicePlan {
  const Plan* plan;
  std::vector<Staged> before;
  std::vector<Staged> after;
};

class VendorDevices final : public RawStreams, public Guardian, public std::enable_shared_from_this<VendorDevices> {
 public:
  using Tensors = std::vector<at::Tensor>;

  // Throws where there is no usable library; the text says why and what to do. `backend` is asked only by calls of its
  // own.
  VendorDevices(SageBackend& backend, c10::DeviceType type, const std::string& vendor, const std::string& library,
                const std::vector<std::string>& folders);

  std::string describe() const { return std::string(devices_->describe()); }

  // Puts calls on a stream of the device, as one launch where there are several. Never waits for a peer, but for the
  // first call that needs a communicator, which is made when all its ranks are there, and in a barrier. Null for a
  // synchronous call when nobody listens: the caller's stream holds all of it, and so its tensors.
  // `region`: all ranks know of the calls, messages among them, so these need no communicator of their own.
  c10::intrusive_ptr<DeviceWork> submit(std::vector<DevicePlan>& calls, const Label& label, Tensors keep,
                                        Tensors outputs, c10::Device device, bool async, bool region = false);
  // A work whose `wait` returns when every collective that was issued before has ended; null where none was.
  // `by_itself`: it shall complete without anyone waiting.
  c10::intrusive_ptr<DeviceWork> behind_all(bool by_itself);
  // Makes the communicator of all ranks now.
  void connect(c10::Device device) { (void)everyone(device); }

  // Whether the library can make the communicator of a new group of `ranks` out of this group's for a device.
  bool can_split(c10::Device device, const std::vector<uint32_t>& ranks);
  // Waits until what is under way has ended; false where it did not within the timeout, or will not.
  bool drain(std::chrono::milliseconds timeout);
  // Makes it, where all ranks can; all call it at once. `child` is null on a rank that is in no new group.
  void split(c10::Device device, const std::vector<uint32_t>& ranks, VendorDevices* child);
  // The communicator of a group that is about to shrink, which nobody else can use or end any more; it ends with this.
  // `drained`: nothing is under way in it.
  class Retired;
  Retired retire(c10::Device device, bool drained);

  // Unblocks whatever hangs; nothing can be issued afterwards.
  void abort();
  // Leaves with the others, when what is under way is done: within the timeout while all of them live, soon where one
  // is gone. What does not end is aborted, or left behind with a thread that waits for it. Throws what a signal handler
  // raised.
  void close(std::chrono::milliseconds timeout);

  void set_device(c10::DeviceIndex device) const override;
  void* stream(c10::DeviceIndex device, int lane) const override;
  void wait(void* stream, void* event) const override;
  void* record(void* stream) const override;
  void release(void* event) const override;

  std::string look(const Watched& watched, bool passed) override;
  bool ask(c10::DeviceIndex device, const std::function<bool()>& question) override;

 private:
  struct Member {
    explicit Member(rust::Box<RustMember> box) : core(std::move(box)) {}
    const rust::Box<RustMember> core;
    // Whoever sets it ends it, and nobody else uses it from then on.
    std::atomic<bool> aborted{false};
    // It ended when nothing was under way in it: what the device has passed is well.
    std::atomic<bool> drained{false};
  };
  using MemberPtr = std::shared_ptr<Member>;
  // Device, and the two ranks of a message's way; -1 and -1 for the communicator of all.
  using Key = std::tuple<c10::DeviceIndex, int, int>;

  // What is left of a call when it is on its stream.
  class OnStream;

  // Also where torch, or the device's part of it, does not say.
  bool is_capturing(const c10::Stream& stream) const;
  MemberPtr everyone(c10::Device device) { return member({device.index(), -1, -1}); }
  MemberPtr member(const Key& key);
  // Those of the messages with a rank, in both directions, together with that rank.
  void connect_pair(c10::DeviceIndex device, int peer);
  void add(const Key& key);
  MemberPtr make(const Key& key);
  using Launched = c10::SmallVector<rust::Box<RustLaunched>, 1>;
  void launch(c10::ArrayRef<Launch> launches, const Member& member, void* raw, Launched& launched) const;
  // Messages of a rank for itself, which no library has to carry: the first sent is the first received. Throws where
  // they do not belong together.
  void check_own_messages(const std::vector<DevicePlan>& calls) const;
  void copy_own_messages(c10::ArrayRef<Launch> launches, c10::Device device) const;
  bool is_own_message(const Launch& launch) const;

  // What a barrier on a stream comes behind: the last collective of each other stream. Those of its device are waited
  // for by the stream; those of others are returned.
  std::vector<std::shared_ptr<c10::Event>> come_behind_all(const c10::Stream& stream);
  void is_last(const c10::Stream& stream, const std::shared_ptr<c10::Event>& ended);

  // The communicator of all for a device, if it was made and not ended.
  MemberPtr living(c10::Device device);
  // Takes in a communicator of all that was made for this group elsewhere; all its ranks call.
  void adopt(c10::Device device, rust::Box<RustMember> made);

  SageBackend& backend_;
  const c10::DeviceType type_;
  const pid_t process_ = ::getpid();
  const std::string group_;
  const int ranks_;
  const rust::Box<RustDevices> devices_;
  std::unique_ptr<DeviceStreams> streams_;
  // Held while a communicator is made, so that two threads make them one after the other.
  std::mutex making_;
  // Guards the rest, briefly.
  std::mutex mutex_;
  std::map<Key, MemberPtr> members_;
  // By stream, the end of the last collective that was put on it.
  std::vector<std::pair<c10::Stream, std::shared_ptr<c10::Event>>> last_;
  // For messages. Written by `submit`, read by `behind_all`; nothing is ordered by it.
  std::atomic<uint64_t> last_number_{0};
  // A connection of our own to the group's store, from the first message on.
  std::shared_ptr<Store> store_;
  std::chrono::steady_clock::time_point asked_{};
  // When the group was first seen to have failed, or a peer to be gone.
  std::optional<std::chrono::steady_clock::time_point> trouble_since_;
  // Works that are watched and have not ended. Written by `submit` and by whoever ends a work; read by `close`. Shared,
  // because a work may outlive this. A counter alone: nothing is ordered by it.
  const std::shared_ptr<std::atomic<int64_t>> under_way_ = std::make_shared<std::atomic<int64_t>>(0);
};

class VendorDevices::Retired {
 public:
  Retired() = default;
  Retired(c10::Device device, MemberPtr member) : device_(device), member_(std::move(member)) {}
  Retired(Retired&&) = default;
  Retired& operator=(Retired&&) = default;
  ~Retired();

  bool can_shrink() const { return member_ && member_->core->can_shrink(); }
  // Makes the communicator of `child`, a group of all ranks but `excluded`; all ranks of that group call it at once.
  void shrink(const std::vector<uint32_t>& excluded, VendorDevices& child) const;

 private:
  std::optional<c10::Device> device_;
  MemberPtr member_;
};

}  // namespace sagellm
