// What goes beside the order of the core, and how it is kept in order with the rest: messages that a delegate carries
// in a group over several hosts, and sparse all-reduces, which are made of messages.
#include "c10d/beside.hpp"

#include <algorithm>
#include <utility>

#include "c10d/backend.hpp"
#include "host/errors.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

bool SharedMessage::wait(std::chrono::milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(waiting_);
  if (ended()) return true;
  const bool well = JoinedWork::wait(timeout);
  ended_.store(true, std::memory_order_release);
  return well;
}

SageBackend::WorkPtr SageBackend::delegate_message(const CallDesc& call) {
  const Tensors& tensors = call.outputs.list();
  const bool usual = tensors.size() == 1 && tensors[0].defined() && tensors[0].layout() == at::kStrided;
  if (delegated() || !usual) return by_delegate(call);
  const Piece memory = extent(tensors[0]);
  const bool writes = call.kind == Kind::kRecv;
  if (memory.bytes > 0) {
    checked([&] { group_->wait_for_memory(memory, writes); });
    follow_messages(memory, writes);
  }
  auto work = c10::make_intrusive<SharedMessage>(getRank(), call.label.type, by_delegate(call));
  const std::lock_guard<std::mutex> lock(beside_mutex_);
  messages_.push_back({c10::weak_intrusive_ptr<SharedMessage>(work), memory, writes});
  return work;
}

void SageBackend::follow_messages(const Piece& memory, bool writes) {
  std::vector<c10::intrusive_ptr<SharedMessage>> earlier;
  {
    const std::lock_guard<std::mutex> lock(beside_mutex_);
    const auto over = [&](const DelegatedMessage& message) {
      auto work = message.work.lock();
      if (!work || work->ended()) return true;
      if ((writes || message.writes) && overlap(memory, message.memory)) earlier.push_back(std::move(work));
      return false;
    };
    messages_.erase(std::remove_if(messages_.begin(), messages_.end(), over), messages_.end());
  }
  // How they ended is told by their own Works.
  for (const auto& work : earlier) (void)failure_of([&] { work->wait(kNoTimeout); });
}

void SageBackend::follow_messages(c10::ArrayRef<Plan> plans) {
  {
    const std::lock_guard<std::mutex> lock(beside_mutex_);
    if (messages_.empty()) return;
  }
  for (const Plan& plan : plans) {
    for (const Piece& piece : plan.inputs()) follow_messages(piece, false);
    for (const Piece& piece : plan.outputs()) follow_messages(piece, true);
    for (const Strided& runs : plan.touched()) follow_messages(extent(runs), runs.written);
  }
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
  auto own =
      c10::make_intrusive<SageWork>(getRank(), c10d::OpType::BARRIER, Tensors(), std::make_shared<Events>(), nullptr);
  own->add(*group_, plan, {});
  own->seal();
  const SageWork::Known known{own->getSequencenumber(), call.timeout.count() < 0 ? options_->timeout : call.timeout};
  auto work = c10::make_intrusive<SageWork>(getRank(), c10d::OpType::BARRIER, Tensors(), events_, nullptr, known);
  CallbackPool::instance().post([own, work, earlier = std::move(earlier), staged = staging_.collectives()] {
    for (const auto& each : staged) each->wait_settled();
    // How they ended is told by their own Works.
    for (const WorkPtr& each : earlier) (void)failure_of([&] { each->wait(kNoTimeout); });
    work->end(failure_of([&] { own->wait(kNoTimeout); }));
  });
  if (call.async) return work;
  work->wait(kNoTimeout);
  return nullptr;
}

}  // namespace sagellm
