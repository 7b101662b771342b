// Calls that the core does not order: a delegate's calls through host memory, and sparse all-reduces, which are made of
// messages. Later calls have to wait for them here.
#pragma once

#include <functional>
#include <mutex>
#include <vector>

#include "lower/plan.hpp"
#include "work/work.hpp"

namespace sagellm {

class SideCalls {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Notes a collective that the core runs only in parts, or not at all: a later barrier waits for it.
  void add_collective(const WorkPtr& work);
  // Returns the noted collectives that may not have ended yet.
  std::vector<WorkPtr> collectives();
  // Notes a delegate's call that may be under way, and the memory that it reads or writes. Only the caller owns its
  // Work; a caller who drops it no longer waits for the call.
  void add_delegated(const WorkPtr& work, std::vector<Strided> touched);
  // Waits for the delegate's calls that read or write this memory, where either side writes.
  void follow_delegated(const std::vector<Strided>& touched);
  // In a forked child, which has none of the threads that serve these: never frees them.
  void leak();

 private:
  struct Delegated {
    c10::weak_intrusive_ptr<c10d::Work> work;
    std::vector<Strided> touched;
  };

  // Guards the lists.
  std::mutex mutex_;
  std::vector<WorkPtr> collectives_;
  std::vector<Delegated> delegated_;
};

// Runs `job` on a callback thread; `work` ends when the job ends. Waits for it unless the call is asynchronous.
SideCalls::WorkPtr in_background(c10::intrusive_ptr<SageWork> work, bool async, std::function<void()> job);

}  // namespace sagellm
