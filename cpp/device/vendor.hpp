// Tensors on a device, carried by its vendor's library.
//
// A call on such tensors is lowered like one on the CPU: its pieces are addresses on the device. The core
// (src/engine/device) knows the communicators, what the library must be asked, and whether a call will end. What is
// left to do here: where the library must get something else than what lies in the caller's memory (another type,
// scaled, several tensors behind each other), make it on the communication stream (device/recipe.hpp); keep the
// library's raw stream in order with torch's; and hold the tensors in a Work until the device has come past them.
#pragma once

#include <unistd.h>

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
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

class VendorDevices final : public RawStreams, public std::enable_shared_from_this<VendorDevices> {
 public:
  using Tensors = std::vector<at::Tensor>;

  // Throws where there is no usable library; the text says why and what to do. `backend` is asked only by calls of its
  // own.
  VendorDevices(SageBackend& backend, c10::DeviceType type, const std::string& vendor, const std::string& library,
                const std::vector<std::string>& folders);

  std::string describe() const { return std::string(opened_.description); }

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
  void connect(c10::Device device);

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
  void abort() { devices_->leave(Leave::kAtOnce, 0, false); }
  // Leaves with the others, when what is under way is done: within the timeout while all of them live, soon where one
  // is gone. What does not end is aborted, or left behind with a thread that waits for it. Throws what a signal handler
  // raised.
  void close(std::chrono::milliseconds timeout);

  void* behind(c10::DeviceIndex device, int lane, void* event, const std::vector<void*>& told) const override;
  void* mark(c10::DeviceIndex device, void* stream) const override;

 private:
  // What is left of calls when they are on their stream.
  class OnStream;
  // How the core reaches the other ranks while it makes a communicator.
  class Exchange;

  // Also where torch, or the device's part of it, does not say.
  bool is_capturing(const c10::Stream& stream) const;
  // Runs a call of the core that may make communicators.
  template <class Function>
  auto exchanging(Function function);
  DeviceBegun begin(const std::vector<DevicePlan>& calls, const Tensors& keep, c10::Device device, bool region,
                    bool capturing);
  // Puts the calls and what belongs to them on the stream of `passage`; the event of their end. After an error `keep`
  // and `call` are never let go of.
  std::shared_ptr<c10::Event> put(const std::vector<DevicePlan>& calls, const rust::Vec<DeviceRecipe>& recipes,
                                  const std::shared_ptr<OnStream>& call, Passage& passage, Tensors& keep, bool region,
                                  bool asked_only);
  // A work that follows `made`, from now on watched unless it was captured.
  c10::intrusive_ptr<DeviceWork> follow(DeviceWork::Launched made, c10d::OpType type, Tensors outputs,
                                        std::unique_ptr<Trace> trace, bool captured);
  // Messages of this rank for itself, which no library has to carry: the first sent is the first received.
  void copy_own_messages(const std::vector<DevicePlan>& calls, const std::vector<Launch>& launches,
                         c10::Device device) const;
  // The stream for a message. Each direction between two ranks has its own, so that two ranks that both send first do
  // not deadlock.
  int lane_of(const Plan& plan, bool region) const;
  uint64_t group_timeout() const;

  // What a barrier on a stream comes behind: the last collective of each other stream. Those of its device are waited
  // for by the stream; those of others are returned.
  std::vector<std::shared_ptr<c10::Event>> come_behind_all(const c10::Stream& stream);
  void is_last(const c10::Stream& stream, const std::shared_ptr<c10::Event>& ended);

  SageBackend& backend_;
  const c10::DeviceType type_;
  const pid_t process_ = ::getpid();
  const DevicesOpened opened_;
  const rust::Box<RustDevices>& devices_ = opened_.devices;
  std::unique_ptr<DeviceStreams> streams_;
  // Guards `last_`, briefly.
  std::mutex mutex_;
  // By stream, the end of the last collective that was put on it.
  std::vector<std::pair<c10::Stream, std::shared_ptr<c10::Event>>> last_;
  // Works that are watched and have not ended. Raised by `follow`, lowered by the thread that ends a work, read by
  // `drain`. Shared, because a work may outlive this. A counter alone: nothing is ordered by it.
  const std::shared_ptr<std::atomic<int64_t>> under_way_ = std::make_shared<std::atomic<int64_t>>(0);
};

class VendorDevices::Retired {
 public:
  Retired() = default;
  Retired(c10::Device device, DevicesRetired retired) : device_(device), retired_(std::move(retired)) {}

  bool can_shrink() const { return retired_ && retired_->can_shrink; }
  // Makes the communicator of `child`, a group of all ranks but `excluded`; all ranks of that group call it at once.
  void shrink(const std::vector<uint32_t>& excluded, VendorDevices& child) const;

 private:
  std::optional<c10::Device> device_;
  std::optional<DevicesRetired> retired_;
};

}  // namespace sagellm
