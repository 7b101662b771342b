// The all-reduce of sparse COO tensors. Every rank learns how many numbers each rank has, receives all numbers, and
// adds them in rank order, so all ranks compute the same bits.
//
// The counts are sent by an all-gather of the group, issued in order with all other calls, so the core detects a rank
// that makes a different call. How much data follows is known only after the all-gather. A job on a callback thread
// sends the data as messages between pairs of ranks, because issuing must not wait for a peer.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "c10d/group_facts.hpp"
#include "lower/call.hpp"
#include "work/work.hpp"

namespace sagellm {

class SparseCalls {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  explicit SparseCalls(GroupFacts group) : group_(std::move(group)) {}

  // `backend`: the owner of this object, which the call keeps alive until its end.
  WorkPtr all_reduce(const CallDesc& call, c10::intrusive_ptr<c10d::Backend> backend);
  // The calls that may not have ended yet.
  std::vector<WorkPtr> under_way();
  // Returns a barrier that also waits for the works in `earlier`. The core knows only the parts of a sparse all-reduce,
  // so the core itself cannot order a barrier behind the whole call.
  WorkPtr barrier_behind(std::vector<WorkPtr> earlier, const CallDesc& call);
  // In a forked child: leaks the works, because the child has none of the threads that serve them.
  void leave_to_parent();

 private:
  struct Job;

  // Issues an operation that is a part of a call. Only its Work reports its end; no hooks are called.
  c10::intrusive_ptr<SageWork> issue_part(Plan& plan, c10d::OpType type, Tensors keep) const;

  const GroupFacts group_;
  // Guards `works_`.
  std::mutex mutex_;
  std::vector<WorkPtr> works_;
  // Number of calls that this rank has issued. It gives the messages of each call a separate tag.
  std::atomic<uint32_t> count_{0};
};

}  // namespace sagellm
