// Tensors on a device, carried by its vendor's library.
//
// A call on such tensors is lowered like one on the CPU: its pieces are addresses on the device. The core
// (src/engine/device) has the communicators, decides how the library is called, and detects calls that will never end.
// This class does the rest: where the library needs other data than the caller's memory holds (another type, scaled,
// several tensors packed), it prepares that data on the communication stream (device/prepare.hpp); it keeps the
// library's raw stream in order with torch's; and it holds the tensors in a Work until the device has passed the call.
#pragma once

#include <unistd.h>

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

// The group whose tensors these are.
struct DeviceOwner {
  const RustGroup& group;
  int rank;
  int size;
  std::shared_ptr<Events> events;
  // How the program is told when a call has failed.
  OnFailure on_failure;
  // `wait()` returns when its call has ended, and a synchronous call, too.
  bool blocking_wait;
  // Hands bytes over the CPU side: from rank 0 to all; from one rank to another. Called only during a call of the
  // group.
  std::function<void(at::Tensor& bytes)> broadcast;
  std::function<void(at::Tensor& bytes, int from, int to)> pass;
};

class VendorDevices final {
 public:
  using Tensors = std::vector<at::Tensor>;

  // Throws where there is no usable library; the text says why and what to do.
  VendorDevices(DeviceOwner owner, c10::DeviceType type, const std::string& vendor, const std::string& library,
                const std::vector<std::string>& folders);

  std::string describe() const { return std::string(opened_.description); }

  // Puts calls on a stream of the device, as one launch where there are several. Waits for peers only in a barrier, and
  // in the first call that needs a communicator, until all its ranks have come to make it. Returns null for a
  // synchronous call without hooks: all its work is on the caller's stream, which keeps its tensors in order.
  // `region`: all ranks know of the calls, messages among them, so these need no communicator of their own.
  // The pieces of the calls are addresses on the device. Temporaries stand for tensors of the caller that are not
  // contiguous, or that overlap others: they are filled before the call, and copied back after it.
  c10::intrusive_ptr<DeviceWork> submit(c10::ArrayRef<Plan> calls, const Label& label, Tensors keep, Tensors outputs,
                                        c10::Device device, bool async, bool region = false);
  // A work whose `wait` returns when every collective that was issued before has ended; null where none was.
  // `by_itself`: it completes without a waiting thread.
  c10::intrusive_ptr<DeviceWork> behind_all(bool by_itself);
  // Makes the communicator of all ranks now.
  void connect(c10::Device device);

  // Whether the library can make the communicator of a new group of `ranks` out of this group's for a device.
  bool can_split(c10::Device device, const std::vector<uint32_t>& ranks);
  // Waits until the operations under way have ended; false where they did not end within the timeout, or never will.
  bool drain(std::chrono::milliseconds timeout);
  // Makes the communicator that `can_split` asked about; all ranks call it together, after all have agreed that they
  // can. `child` is null on a rank that is in no new group.
  void split(c10::Device device, const std::vector<uint32_t>& ranks, VendorDevices* child);
  // Takes the communicator of a group that is about to shrink out of use; it ends when the returned object is dropped.
  // `drained`: no operation is under way in it.
  DevicesRetired retire(c10::Device device, bool drained) { return devices_->retire(device.index(), drained); }
  // Makes the communicator of this group, which has all ranks of the group of `old` but `excluded`; all ranks of this
  // group call it together.
  void shrink_from(const RustRetired& old, c10::Device device, const std::vector<uint32_t>& excluded);

  // Aborts all communicators, which unblocks operations that hang; no operation can be issued afterwards. Other threads
  // of the program whose operations are under way are told first.
  void abort();
  // Ends the communicators together with the other ranks, when the operations under way are done: within the timeout
  // while all ranks live, soon where one is gone. A communicator that does not end is aborted, or left to a thread that
  // goes on waiting for it. Throws the exception that a signal handler raised.
  void close(std::chrono::milliseconds timeout);

 private:
  // How the core reaches the other ranks while it makes a communicator.
  class Exchange;

  // Why the group has failed, with its code letter, or empty.
  std::string fault() const { return std::string(owner_.group.state().fault); }
  // Asks the core where torch, or the device's part of it, does not say.
  bool is_capturing(const c10::Stream& stream) const;
  // Runs a call of the core that may make communicators.
  template <class Function>
  auto exchanging(Function function);
  DeviceBegun begin(c10::ArrayRef<Plan> calls, const Tensors& keep, c10::Device device, bool region, bool capturing);
  // Puts the calls, with the steps before and after them, on the stream of `passage`. Returns the event of their end.
  // After an error `keep` and `call` are leaked.
  std::shared_ptr<c10::Event> put(c10::ArrayRef<Plan> calls, const rust::Vec<DeviceLowering>& lowerings,
                                  const std::shared_ptr<DeviceCall>& call, Passage& passage, Tensors& keep,
                                  bool asked_only);
  // How a call is launched.
  struct Terms {
    bool async = false;
    // The caller's stream is being captured into a graph.
    bool capturing = false;
    bool barrier = false;
    // The caller or a hook sees the Work of the call.
    bool listened = false;
  };
  // No replay is looked at from now on.
  void forget_captured();
  // Launches calls that `begin` has checked, on the caller's stream or the group's. Returns what their work needs.
  DeviceWork::Launched launch(c10::ArrayRef<Plan> calls, const DeviceBegun& begun,
                              const std::shared_ptr<DeviceCall>& call, c10::Device device, Tensors keep,
                              const Terms& terms);
  // The work for `made`. The watching thread watches it from now on, unless it was captured.
  c10::intrusive_ptr<DeviceWork> follow(DeviceWork::Launched made, c10d::OpType type, Tensors outputs,
                                        std::unique_ptr<Trace> trace, bool captured);

  // Makes a barrier on a stream wait for the last collective of each other stream. The stream itself waits for
  // collectives of its device; the events of collectives on other devices are returned.
  std::vector<std::shared_ptr<c10::Event>> come_behind_all(const c10::Stream& stream) const;

  const DeviceOwner owner_;
  const c10::DeviceType type_;
  const pid_t process_ = ::getpid();
  const DevicesOpened opened_;
  const rust::Box<RustDevices>& devices_ = opened_.devices;
  DeviceStreams streams_{&*devices_};
  // The end events of the collectives that were launched on streams.
  const std::shared_ptr<LastEnds> last_ = std::make_shared<LastEnds>();
  // Captured calls: the first, which stands for all where replays are looked at, and those whose memory replays need.
  // torch does not report when a graph is destroyed, so they are kept as long as the group.
  std::mutex captured_mutex_;
  std::vector<std::shared_ptr<DeviceCall>> captured_;
  // Counts the works that are watched and have not ended, for `drain`. Shared, because a work may outlive this.
  const std::shared_ptr<Failure> failure_ = std::make_shared<Failure>(owner_.on_failure, owner_.events);
};

}  // namespace sagellm
