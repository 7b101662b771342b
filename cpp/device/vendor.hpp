// Tensors on a device, carried by its vendor's library.
//
// A call on such tensors is lowered like a call on the CPU; its pieces are addresses on the device. The core
// (src/engine/device) owns the communicators, decides how the library is called, and detects calls that will never end.
// This class does the rest. If the library needs other data than the caller's memory holds (another type, scaled
// numbers, several tensors packed), it prepares that data on the communication stream (device/prepare.hpp). It orders
// the library's raw stream with torch's streams. And it keeps the tensors in a Work until the device has passed the
// call.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/failure.hpp"
#include "device/prepare.hpp"
#include "device/streams.hpp"
#include "device/work.hpp"
#include "lower/plan.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

// What `VendorDevices` needs from the group that uses the library.
struct DeviceOwner {
  const RustGroup& group;
  int rank;
  int size;
  std::shared_ptr<Events> events;
  // How a failed call is reported to the program.
  OnFailure on_failure;
  // `wait()` and synchronous calls block the host until the call has ended.
  bool blocking_wait;
  // These two functions send bytes over the group's CPU side: from rank 0 to all ranks, and from one rank to another.
  // Called only during a call of the group.
  std::function<void(at::Tensor& bytes)> broadcast;
  std::function<void(at::Tensor& bytes, int from, int to)> pass;
};

class VendorDevices final {
 public:
  using Tensors = std::vector<at::Tensor>;

  // Throws if no usable library is found; the text says why and what to do.
  VendorDevices(DeviceOwner owner, c10::DeviceType type, const std::string& vendor, const std::string& library,
                const std::vector<std::string>& folders);

  std::string describe() const { return std::string(opened_.description); }

  // Enqueues calls on a stream of the device; several calls are one launch. It waits for peers in a synchronous barrier
  // and with `blocking_wait`. It also waits in the first call that needs a communicator, until all ranks of the
  // communicator have reached that call. It waits for peers in no other case. Returns null for a synchronous call
  // without hooks: all its work is on the caller's stream, which orders later uses of its tensors. `region`: all ranks
  // take part in the calls, messages included, so messages need no communicator of their own. The pieces of the calls
  // are addresses on the device. A temporary replaces each of the caller's tensors that is not contiguous or overlaps
  // another. Temporaries are filled before the call, and results are copied back after it.
  c10::intrusive_ptr<DeviceWork> submit(c10::ArrayRef<Plan> calls, const Label& label, Tensors keep, Tensors outputs,
                                        c10::Device device, bool async, bool region = false);
  // Returns a work whose `wait` returns when all collectives issued before have ended; null if there are none.
  // `by_itself`: the work completes even if no thread waits for it.
  c10::intrusive_ptr<DeviceWork> behind_all(bool by_itself);
  // Makes the communicator of all ranks now instead of at the first call.
  void connect(c10::Device device);

  // Whether the library can make the communicator of a new group of `ranks` from this group's communicator.
  bool can_split(c10::Device device, const std::vector<uint32_t>& ranks);
  // Waits until the pending operations have ended. Returns false if the timeout passes before that, or if the watching
  // thread has stopped.
  bool drain(std::chrono::milliseconds timeout);
  // Makes the communicator that `can_split` asked about. All ranks call this together, after all have agreed that they
  // can. `child` is null on a rank that is in no new group.
  void split(c10::Device device, const std::vector<uint32_t>& ranks, VendorDevices* child);
  // Retires this group's communicator before a shrink: no later call uses the communicator, and dropping the returned
  // object destroys it. `drained`: no operation is pending in it.
  DevicesRetired retire(c10::Device device, bool drained) { return devices_->retire(device.index(), drained); }
  // Makes the communicator of this group, which consists of all ranks of `old`'s group except `excluded`. All ranks of
  // this group call this together.
  void shrink_from(const RustRetired& old, c10::Device device, const std::vector<uint32_t>& excluded);

  // Aborts all communicators, which unblocks operations that hang. No operation can be issued afterwards. Other threads
  // of the program whose operations are pending get the exception first.
  void abort();
  // Ends the communicators together with the other ranks, after the pending operations have ended. This takes at most
  // the timeout, and less if a rank has died. A communicator that does not end is aborted, or left to a thread that
  // keeps waiting for it. Throws the exception that a signal handler raised.
  void close(std::chrono::milliseconds timeout);

 private:
  // How the core reaches the other ranks while it makes a communicator.
  class Exchange;

  // The error with which the group has failed, with its code letter; empty if it has not failed.
  std::string fault() const { return std::string(owner_.group.state().fault); }
  // Whether the stream is being captured. Asks the core if torch, or the device's guard, cannot tell.
  bool is_capturing(const c10::Stream& stream) const;
  // Runs `function`, a core call that may make communicators. If its `Exchange` threw, rethrows that exception.
  template <class Function>
  auto exchanging(Function function);
  DeviceBegun begin(c10::ArrayRef<Plan> calls, const Tensors& keep, c10::Device device, bool region, bool capturing);
  // Enqueues the calls, with the steps before and after them, on the stream of `passage`. `callers` is the current
  // stream. Returns the event at the end of all this work. If it throws, it has leaked `keep` and `call`.
  std::shared_ptr<c10::Event> put(c10::ArrayRef<Plan> calls, const rust::Vec<DeviceLowering>& lowerings,
                                  const CallPtr& call, const c10::Stream& callers, Passage& passage, Tensors& keep,
                                  bool asked_only);
  // Properties of one launch.
  struct Terms {
    bool async = false;
    // The caller's stream is being captured into a graph.
    bool capturing = false;
    bool barrier = false;
    // The caller or a hook gets the Work of the call.
    bool listened = false;
  };
  // Drops the captured calls. Their replays are no longer checked.
  void forget_captured();
  // Launches calls that `begin` has checked, on the caller's stream or the group's. Returns the data for their Work.
  DeviceWork::Launched launch(c10::ArrayRef<Plan> calls, const DeviceBegun& begun, const CallPtr& call,
                              const c10::Stream& callers, Tensors keep, const Terms& terms);
  // Makes the Work for `made`, and hands it to the watching thread unless the call was captured. If no other code would
  // see the Work or wait for it, makes none and returns null.
  c10::intrusive_ptr<DeviceWork> follow(DeviceWork::Launched made, c10d::OpType type, Tensors outputs,
                                        std::unique_ptr<Trace> trace, const Terms& terms);

  // Makes a barrier on `stream` wait for the last collective of every other stream. For collectives on its own device,
  // `stream` waits. For collectives on other devices, the end events are returned.
  std::vector<std::shared_ptr<c10::Event>> come_behind_all(const c10::Stream& stream) const;

  const DeviceOwner owner_;
  const c10::DeviceType type_;
  const DevicesOpened opened_;
  const rust::Box<RustDevices>& devices_ = opened_.devices;
  DeviceStreams streams_{&*devices_};
  // End events of the last collective on each stream.
  const std::shared_ptr<LastEnds> last_ = std::make_shared<LastEnds>();
  // Captured calls: the first one, which represents all of them when replays are checked, and every call whose host
  // memory a replay reads. torch does not report when a graph is destroyed, so these calls are kept as long as the
  // group.
  std::mutex captured_mutex_;
  std::vector<CallPtr> captured_;
  // Handles failures, and counts the calls under way for `drain`. Shared, because a work may outlive this object.
  const std::shared_ptr<Failure> failure_ = std::make_shared<Failure>(owner_.on_failure, owner_.events);
};

}  // namespace sagellm
