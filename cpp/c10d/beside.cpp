// Calls that the core does not order, and how they are kept in order with the others: a delegate's calls through host
// memory, and sparse all-reduces, which are made of messages.
#include "c10d/beside.hpp"

#include <algorithm>
#include <utility>

#include "c10d/backend.hpp"
#include "host/errors.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

void SageBackend::add_delegated(const WorkPtr& work, std::vector<Strided> touched) {
  const std::lock_guard<std::mutex> lock(beside_mutex_);
  delegated_calls_.push_back({c10::weak_intrusive_ptr<c10d::Work>(work), std::move(touched)});
}

void SageBackend::follow_delegated(const std::vector<Strided>& touched) {
  std::vector<WorkPtr> earlier;
  {
    const std::lock_guard<std::mutex> lock(beside_mutex_);
    const auto over = [&](const DelegatedCall& call) {
      WorkPtr work = call.work.lock();
      if (!work || work->isCompleted()) return true;
      if (conflict(call.touched, touched)) earlier.push_back(std::move(work));
      return false;
    };
    delegated_calls_.erase(std::remove_if(delegated_calls_.begin(), delegated_calls_.end(), over),
                           delegated_calls_.end());
  }
  // Their own Works report how they ended.
  for (const WorkPtr& work : earlier) (void)failure_of([&] { work->wait(kNoTimeout); });
}

SageBackend::WorkPtr SageBackend::in_background(c10::intrusive_ptr<SageWork> work, bool async,
                                                std::function<void()> job) {
  CallbackPool::instance().post([work, job = std::move(job)] { work->end(failure_of(job)); });
  if (async) return work;
  work->wait(kNoTimeout);
  return nullptr;
}

SageBackend::WorkPtr SageBackend::beside(WorkPtr work) {
  if (work) {
    pending_beside();
    const std::lock_guard<std::mutex> lock(beside_mutex_);
    beside_.push_back(work);
  }
  return work;
}

std::vector<SageBackend::WorkPtr> SageBackend::pending_beside() {
  const std::lock_guard<std::mutex> lock(beside_mutex_);
  beside_.erase(std::remove_if(beside_.begin(), beside_.end(), [](const WorkPtr& work) { return work->isCompleted(); }),
                beside_.end());
  return beside_;
}

SageBackend::WorkPtr SageBackend::barrier_behind(std::vector<WorkPtr> earlier, const CallDesc& call) {
  Plan plan(call.op, call.kind, call.timeout);
  auto own = issue_part(plan, c10d::OpType::BARRIER, {});
  const SageWork::Known known{own->getSequencenumber(), call.timeout.count() < 0 ? options_->timeout : call.timeout};
  auto work = c10::make_intrusive<SageWork>(getRank(), c10d::OpType::BARRIER, Tensors(), events_, nullptr, known);
  return in_background(std::move(work), call.async, [own, earlier = std::move(earlier)] {
    // Their own Works report how they ended.
    for (const WorkPtr& each : earlier) (void)failure_of([&] { each->wait(kNoTimeout); });
    own->wait(kNoTimeout);
  });
}

}  // namespace sagellm
