// A region: the calls between startCoalescing and endCoalescing. torch opens a region around a batch of sends and
// receives, and around the calls of its coalescing manager. Calls on a device are collected; at the region's end the
// vendor's library launches all of them as one. Calls on the CPU are issued immediately. No call waits inside the
// region; its end returns a Work for all calls. A call that throws closes the region: torch does not end a region after
// an exception, and a region that stays open would collect later calls and never run them.
#pragma once

#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "c10d/owner_thread.hpp"
#include "device/vendor.hpp"
#include "lower/plan.hpp"
#include "work/joined.hpp"

namespace sagellm {

class Region {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  // All calls since the beginning of the region.
  struct Content {
    std::vector<Plan> plans;
    std::optional<Label> label;
    std::optional<c10::Device> device;
    Tensors keep;
    Tensors outputs;
    std::vector<WorkPtr> works;
  };

  // Opens a region. Only one may be open at a time, and the thread that opens it must end it.
  void start();
  // True on the thread of the open region. Costs one relaxed load if no region is open.
  bool open() const { return owner_.is_here(); }
  void add(WorkPtr work) { content_.works.push_back(std::move(work)); }
  // Adds calls on a device. All calls of a region must be on the same device.
  void add(c10::ArrayRef<Plan> plans, const Label& label, Tensors keep, Tensors outputs, c10::Device device);
  // Throws if no region is open on this thread: the error of the call that closed the region or, if there is none, a
  // ValueError.
  Content end();
  // Closes the region after a call in it has thrown `why`, and drops the calls on a device that it has collected.
  void refuse(std::exception_ptr why);
  // Closes the region because the program leaves it by an exception. Drops the collected calls on a device. Keeps no
  // error for `end`, not even that of a call that has closed the region already. Does nothing on other threads.
  void drop();

 private:
  // The last thread whose region was closed before its end, and the error that closed it, or null.
  struct Refused {
    std::thread::id thread;
    std::exception_ptr why;
  };
  // Returns the error that closed this thread's region, and forgets it. Null if there is none.
  std::exception_ptr take_refused();

  // The thread of the open region.
  OwnerThread owner_;
  // Used only by that thread.
  Content content_;
  // Guards `refused_`, which is used by threads without an open region, too.
  std::mutex mutex_;
  Refused refused_;
};

}  // namespace sagellm
