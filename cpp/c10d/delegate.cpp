#include "c10d/delegate.hpp"

#include <ATen/EmptyTensor.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "host/errors.hpp"
#include "lower/checks.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

namespace {

// The Work of a call with copies in host memory; a callback thread ends it.
class CarriedWork final : public SageWork {
 public:
  CarriedWork(int rank, const CallDesc& call, std::shared_ptr<Events> events, std::chrono::milliseconds timeout,
              c10::intrusive_ptr<Work> inner)
      : SageWork(rank, call.label.type, call.outputs.flat(), std::move(events), nullptr, Known{0, timeout}),
        inner_(std::move(inner)) {}

  int sourceRank() const override { return inner_->sourceRank(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  const c10::intrusive_ptr<Work> inner_;
};

}  // namespace

Delegate::BackendPtr Delegate::backend() const {
  refuse_forked(*group_.events);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!backend_) {
    raise(ErrorKind::kAborted, c10::str("sagellm: the group is served by ", name(), " (", reason_,
                                        "), which it released when it was shut down"));
  }
  return backend_;
}

bool Delegate::supports_coalescing() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return backend_ && backend_->supportsCoalescing();
}

Delegate::WorkPtr Delegate::issue(const CallDesc& call, bool host_staged) {
  const auto other = backend();
  if (call.is_message()) check::message(call, {group_.rank, group_.size, c10::kCPU});
  const auto note =
      std::make_shared<rust::Box<RustExternalOp>>(group_.core.delegate_op(external_op(call, host_staged)));
  WorkPtr work;
  try {
    work = call.delegate(*other, call);
  } catch (const std::exception&) {
    DelegatedWork::not_issued(note, other->getBackendName());
  }
  if (!work) {
    (*note)->ended_unseen();
    return work;
  }
  return c10::make_intrusive<DelegatedWork>(group_.rank, call.label.type, std::move(work), note, group_.options.timeout,
                                            dropped_);
}

Delegate::WorkPtr Delegate::carry_through_host(const CallDesc& call, c10::Device device, Staging& staging) {
  refuse_forked(*group_.events);
  std::vector<Staged> before;
  std::vector<Staged> after;
  std::vector<Strided> touched;
  const Replaced host(call, [&](const at::Tensor& tensor, Role role) {
    at::Tensor copy(at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type()));
    if (role != Role::kWrite) before.push_back({copy, tensor});
    if (role != Role::kRead) after.push_back({copy, tensor});
    if (tensor.numel() > 0) touched.push_back(runs_of(tensor, role != Role::kRead));
    return copy;
  });
  staging.wait_for_stream(call.op, device);
  DeferredRelease::instance().release();
  const c10::Stream side = staging.stream(device);
  // A delegate does not order operations on the same memory, so wait for the earlier ones.
  wait_for_conflicts(touched);
  {
    const c10::StreamGuard on(side);
    copy_staged(before, false);
  }
  WorkPtr inner = issue(host.call(), true);
  if (!inner) {
    const c10::StreamGuard on(side);
    copy_staged(after, true);
    return nullptr;
  }
  // Only one thread waits for the delegate's work: gloo's works allow only one waiter, works of some backends have no
  // future, and other backends complete the future on their own threads.
  auto work = c10::make_intrusive<CarriedWork>(group_.rank, call, group_.events, group_.options.timeout, inner);
  {
    const std::lock_guard<std::mutex> lock(copied_mutex_);
    copied_.push_back({c10::weak_intrusive_ptr<c10d::Work>(work), std::move(touched)});
  }
  return in_background(std::move(work), true, [inner, after = std::move(after), side] {
    inner->wait(kNoTimeout);
    const c10::StreamGuard on(side);
    copy_staged(after, true);
  });
}

void Delegate::wait_for_conflicts(const std::vector<Strided>& touched) {
  std::vector<WorkPtr> earlier;
  {
    const std::lock_guard<std::mutex> lock(copied_mutex_);
    const auto over = [&](const Copied& call) {
      WorkPtr work = call.work.lock();
      if (!work || work->isCompleted()) return true;
      if (conflict(call.touched, touched)) earlier.push_back(std::move(work));
      return false;
    };
    copied_.erase(std::remove_if(copied_.begin(), copied_.end(), over), copied_.end());
  }
  wait_quietly(earlier);
}

void Delegate::monitored_barrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const auto other = backend();
  try {
    other->monitoredBarrier(opts, wait_all_ranks);
  } catch (const std::exception&) {
    // gloo closes its connections when one of its waits times out.
    barrier_failed_.store(true, std::memory_order_relaxed);
    throw;
  }
}

void Delegate::abort() {
  dropped_->end();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (backend_) backend_->abort();
}

void Delegate::shutdown() {
  BackendPtr backend;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    backend.swap(backend_);
  }
  dropped_->end();
  // Released now, because a gloo group that still exists when the process exits sometimes fails there.
  if (backend) backend->shutdown();
}

void Delegate::leave_to_parent() {
  // Leaked: a forked child has none of the threads that serve these objects, and their destructors would wait for them.
  // No lock is taken, because a thread of the parent may have held it at the fork.
  new auto(std::move(backend_));
  new auto(std::move(copied_));
  new auto(dropped_);
}

}  // namespace sagellm
