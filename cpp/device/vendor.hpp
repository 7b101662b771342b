// Tensors on a device, carried by its vendor's library.
//
// A call on such tensors is lowered like one on the CPU: its pieces are addresses on the device. The core
// (src/engine/device) knows the communicators, what the library must be asked, and whether a call will end. What is
// left to do here: where the library must get something else than what lies in the caller's memory (another type,
// scaled, several tensors behind each other), make it on the communication stream (device/prepare.hpp); keep the
// library's raw stream in order with torch's; and hold the tensors in a Work until the device has come past them.
#pragma once

#include <unistd.h>

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "device/prepare.hpp"
#include "device/streams.hpp"
#include "device/work.hpp"
#include "lower/plan.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

// The group whose tensors these are.
struct DeviceOwner {
  const RustGroup& group;
  int rank;
  int size;
  std::shared_ptr<Events> events;
  // Hands bytes from one rank to all (`from` is -1: from rank 0) or to one, over the CPU. Asked only while a call of
  // the group is made.
  std::function<void(at::Tensor& bytes, int from, int to)> share;
};

class VendorDevices final {
 public:
  using Tensors = std::vector<at::Tensor>;

  // Throws where there is no usable library; the text says why and what to do.
  VendorDevices(DeviceOwner owner, c10::DeviceType type, const std::string& vendor, const std::string& library,
                const std::vector<std::string>& folders);

  std::string describe() const { return std::string(opened_.description); }

  // Puts calls on a stream of the device, as one launch where there are several. Never waits for a peer, but for the
  // first call that needs a communicator, which is made when all its ranks are there, and in a barrier. Null for a
  // synchronous call when nobody listens: the caller's stream holds all of it, and so its tensors.
  // `region`: all ranks know of the calls, messages among them, so these need no communicator of their own.
  // The pieces of the calls are addresses on the device. Temporaries stand for tensors of the caller that are not
  // contiguous, or that overlap others: they are filled before the call, and copied back after it.
  c10::intrusive_ptr<DeviceWork> submit(c10::ArrayRef<Plan> calls, const Label& label, Tensors keep, Tensors outputs,
                                        c10::Device device, bool async, bool region = false);
  // A work whose `wait` returns when every collective that was issued before has ended; null where none was.
  // `by_itself`: it shall complete without anyone waiting.
  c10::intrusive_ptr<DeviceWork> behind_all(bool by_itself);
  // Makes the communicator of all ranks now.
  void connect(c10::Device device);

  // Whether the library can make the communicator of a new group of `ranks` out of this group's for a device.
  bool can_split(c10::Device device, const std::vector<uint32_t>& ranks);
  // Waits until what is under way has ended; false where it did not within the timeout, or will not.
  bool drain(std::chrono::milliseconds timeout);
  // Makes it, where all ranks can; all call it at once. `child` is null on a rank that is in no new group.
  void split(c10::Device device, const std::vector<uint32_t>& ranks, VendorDevices* child);
  // The communicator of a group that is about to shrink, which nobody else can use or end any more; it ends with this.
  // `drained`: nothing is under way in it.
  DevicesRetired retire(c10::Device device, bool drained) { return devices_->retire(device.index(), drained); }
  // Makes the communicator of this group, of all ranks but `excluded` of the one that `old` was of; all ranks of this
  // group call it at once.
  void shrink_from(const RustRetired& old, c10::Device device, const std::vector<uint32_t>& excluded);

  // Unblocks whatever hangs; nothing can be issued afterwards.
  void abort() { devices_->leave(Leave::kAtOnce, 0, false); }
  // Leaves with the others, when what is under way is done: within the timeout while all of them live, soon where one
  // is gone. What does not end is aborted, or left behind with a thread that waits for it. Throws what a signal handler
  // raised.
  void close(std::chrono::milliseconds timeout);

 private:
  // How the core reaches the other ranks while it makes a communicator.
  class Exchange;

  // Also where torch, or the device's part of it, does not say.
  bool is_capturing(const c10::Stream& stream) const;
  // Runs a call of the core that may make communicators.
  template <class Function>
  auto exchanging(Function function);
  DeviceBegun begin(c10::ArrayRef<Plan> calls, const Tensors& keep, c10::Device device, bool region, bool capturing);
  // Puts the calls and what belongs to them on the stream of `passage`; the event of their end. After an error `keep`
  // and `call` are never let go of.
  std::shared_ptr<c10::Event> put(c10::ArrayRef<Plan> calls, const rust::Vec<DeviceLowering>& lowerings,
                                  const std::shared_ptr<DeviceCall>& call, Passage& passage, Tensors& keep,
                                  bool asked_only);
  // A work that follows `made`, from now on watched unless it was captured.
  c10::intrusive_ptr<DeviceWork> follow(DeviceWork::Launched made, c10d::OpType type, Tensors outputs,
                                        std::unique_ptr<Trace> trace, bool captured);

  // What a barrier on a stream comes behind: the last collective of each other stream. Those of its device are waited
  // for by the stream; those of others are returned.
  std::vector<std::shared_ptr<c10::Event>> come_behind_all(const c10::Stream& stream);

  const DeviceOwner owner_;
  const c10::DeviceType type_;
  const pid_t process_ = ::getpid();
  const DevicesOpened opened_;
  const rust::Box<RustDevices>& devices_ = opened_.devices;
  DeviceStreams streams_{&*devices_};
  // Guards `last_`, briefly.
  std::mutex mutex_;
  // By stream, the end of the last collective that was put on it.
  std::unordered_map<c10::Stream, std::shared_ptr<c10::Event>> last_;
  // Works that are watched and have not ended. Raised by `follow`, lowered by the thread that ends a work, read by
  // `drain`. Shared, because a work may outlive this. A counter alone: nothing is ordered by it.
  const std::shared_ptr<std::atomic<int64_t>> under_way_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace sagellm
