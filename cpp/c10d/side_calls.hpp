// The core does not order two kinds of calls: calls that a delegate carries through host memory, and sparse
// all-reduces, which consist of messages. This class makes later calls wait for such calls.
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

  // Records a collective that the core runs only in parts or not at all, so that a later barrier waits for it.
  void add_collective(const WorkPtr& work);
  // Returns the recorded collectives that may not have ended yet.
  std::vector<WorkPtr> collectives();
  // Records a delegate's call that may be under way, and the memory that it reads or writes. The Work is held weakly: a
  // call whose Work no longer exists counts as ended.
  void add_delegated(const WorkPtr& work, std::vector<Strided> touched);
  // Waits for the delegate's calls that conflict with this memory: one side writes a byte that the other reads or
  // writes.
  void follow_delegated(const std::vector<Strided>& touched);
  // In a forked child: leaks the works, because the child has none of the threads that serve them.
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

// Runs `job` on a callback thread; `work` ends with the job. Waits for `work` unless `async`.
SideCalls::WorkPtr in_background(c10::intrusive_ptr<SageWork> work, bool async, std::function<void()> job);

}  // namespace sagellm
