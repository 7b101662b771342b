#include "c10d/side_calls.hpp"

#include <algorithm>
#include <utility>

#include "host/errors.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

void SideCalls::add_collective(const WorkPtr& work) {
  (void)collectives();
  const std::lock_guard<std::mutex> lock(mutex_);
  collectives_.push_back(work);
}

std::vector<SideCalls::WorkPtr> SideCalls::collectives() {
  const std::lock_guard<std::mutex> lock(mutex_);
  collectives_.erase(
      std::remove_if(collectives_.begin(), collectives_.end(), [](const WorkPtr& work) { return work->isCompleted(); }),
      collectives_.end());
  return collectives_;
}

void SideCalls::add_delegated(const WorkPtr& work, std::vector<Strided> touched) {
  const std::lock_guard<std::mutex> lock(mutex_);
  delegated_.push_back({c10::weak_intrusive_ptr<c10d::Work>(work), std::move(touched)});
}

void SideCalls::follow_delegated(const std::vector<Strided>& touched) {
  std::vector<WorkPtr> earlier;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto over = [&](const Delegated& call) {
      WorkPtr work = call.work.lock();
      if (!work || work->isCompleted()) return true;
      if (conflict(call.touched, touched)) earlier.push_back(std::move(work));
      return false;
    };
    delegated_.erase(std::remove_if(delegated_.begin(), delegated_.end(), over), delegated_.end());
  }
  // Errors are ignored here, because each earlier call's own Work reports its error.
  for (const WorkPtr& work : earlier) (void)failure_of([&] { work->wait(kNoTimeout); });
}

void SideCalls::leak() {
  // No lock is taken, because a thread of the parent may have held it at the fork.
  new auto(std::move(collectives_));
  new auto(std::move(delegated_));
}

SideCalls::WorkPtr in_background(c10::intrusive_ptr<SageWork> work, bool async, std::function<void()> job) {
  CallbackPool::instance().post([work, job = std::move(job)] { work->end(failure_of(job)); });
  if (async) return work;
  work->wait(kNoTimeout);
  return nullptr;
}

}  // namespace sagellm
