// A region: the calls between startCoalescing and endCoalescing, which torch puts around batches of sends and receives
// and around the calls of its coalescing manager. Calls on a device are collected until the end and are one launch of
// the vendor's library. Calls on the CPU are issued at once, as always, and no call waits inside the region; its end
// returns a Work of all of them. A call that throws closes the region: torch ends a region only where nothing was
// thrown, and in a region that stays open no synchronous call would ever run.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

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

  // Opens a region: one at a time, on the thread that will end it.
  void start();
  // True on the thread of an open region. One relaxed load where there is none.
  bool open() const {
    return C10_UNLIKELY(open_.load(std::memory_order_relaxed)) && thread_ == std::this_thread::get_id();
  }
  void add(WorkPtr work) { content_.works.push_back(std::move(work)); }
  // All on one device.
  void add(c10::ArrayRef<Plan> plans, const Label& label, Tensors keep, Tensors outputs, c10::Device device);
  // Throws where none is open: the error that closed it, or a ValueError.
  Content end();
  // A call in it threw `why`: closes it and drops the calls on a device that it has collected.
  void refuse(std::exception_ptr why);
  // The program leaves it by an exception: the same, and `end` is not expected any more. Does nothing on other threads.
  void drop();

 private:
  // Written by the thread of the region alone, and so are the others; read by all.
  std::atomic<bool> open_{false};
  std::thread::id thread_;
  Content content_;
  // Why it was closed before its end.
  std::exception_ptr refused_;
};

}  // namespace sagellm
