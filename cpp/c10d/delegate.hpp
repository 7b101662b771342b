// The backend of torch that carries all calls of a group that the engine cannot serve. It is called with the caller's
// own tensors or, if they are on a device, with copies in host memory.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "c10d/group_facts.hpp"
#include "c10d/staging.hpp"
#include "lower/call.hpp"
#include "work/delegated.hpp"

namespace sagellm {

class Delegate {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // In a group that the engine serves, `backend` is null and `reason` is empty.
  Delegate(GroupFacts group, BackendPtr backend, std::string reason)
      : group_(std::move(group)), reason_(std::move(reason)), backend_(std::move(backend)) {}

  // True if the delegate carries the calls on tensors in the CPU's memory.
  bool serves() const { return C10_UNLIKELY(!reason_.empty()); }
  // Why the delegate serves the group, or empty.
  const std::string& reason() const { return reason_; }
  // Name of the backend that serves the group if the engine cannot, for error texts.
  std::string name() const { return group_.options.delegate.empty() ? "gloo" : group_.options.delegate; }
  // Throws in a forked child, and after `shutdown`.
  BackendPtr backend() const;
  bool supports_coalescing() const;

  // Carries a call, records it in the statistics and watches it.
  WorkPtr carry(const CallDesc& call) { return issue(call, false); }
  // Carries a call on device tensors, with copies of the tensors in host memory. A callback thread waits for the
  // delegate, and a thread that issues a later call on the same memory first waits for the earlier call.
  WorkPtr carry_through_host(const CallDesc& call, c10::Device device, Staging& staging);
  void monitored_barrier(const c10d::BarrierOptions& opts, bool wait_all_ranks);
  // True if a monitored barrier has failed, after which the delegate's group may be broken. The core records failures
  // of the other calls, but does not see monitored barriers.
  bool barrier_failed() const { return barrier_failed_.load(std::memory_order_relaxed); }

  void abort();
  // Releases the backend.
  void shutdown();
  // In a forked child: leaks everything that belongs to the parent.
  void leave_to_parent();

 private:
  // A call that may not have ended, on device tensors, and the memory that the call reads or writes. The Work is held
  // weakly: a call whose Work no longer exists counts as ended.
  struct Copied {
    c10::weak_intrusive_ptr<c10d::Work> work;
    std::vector<Strided> touched;
  };

  WorkPtr issue(const CallDesc& call, bool host_staged);
  // Waits for each call in `copied_` that conflicts with `touched`, where one of the two writes a byte that the other
  // reads or writes.
  void wait_for_conflicts(const std::vector<Strided>& touched);

  const GroupFacts group_;
  const std::string reason_;
  // Guards `backend_`. `abort` also holds it while it aborts the backend.
  mutable std::mutex mutex_;
  BackendPtr backend_;
  // Guards `copied_`.
  std::mutex copied_mutex_;
  std::vector<Copied> copied_;
  const std::shared_ptr<DroppedMessages> dropped_ = std::make_shared<DroppedMessages>();
  // Written and read by any thread (relaxed: it orders no other memory access).
  std::atomic<bool> barrier_failed_{false};
};

}  // namespace sagellm
