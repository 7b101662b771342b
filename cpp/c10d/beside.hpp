// What goes beside the order of the core: messages that a delegate carries in a group over several hosts.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "lower/plan.hpp"

namespace sagellm {

// A message of a delegate's that several may wait for: gloo's ends the wait of one of them only.
class SharedMessage final : public c10d::Work {
 public:
  SharedMessage(int rank, c10d::OpType type, c10::intrusive_ptr<c10d::Work> message)
      : c10d::Work(rank, type), message_(std::move(message)) {}

  bool isCompleted() override { return ended_.load(std::memory_order_acquire) || message_->isCompleted(); }
  bool isSuccess() const override { return message_->isSuccess(); }
  std::exception_ptr exception() const override { return message_->exception(); }
  int sourceRank() const override { return message_->sourceRank(); }
  std::vector<at::Tensor> result() override { return message_->result(); }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { message_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return message_->getFuture(); }
  // Waited for, well.
  bool ended() const { return ended_.load(std::memory_order_acquire); }

 private:
  const c10::intrusive_ptr<c10d::Work> message_;
  // Held by the one that waits; the others wait for it here.
  std::mutex waiting_;
  // Written under the mutex (release), read by anyone (acquire).
  std::atomic<bool> ended_{false};
};

// One that may be under way, and what it reads or writes. Its Work is the caller's: who drops that has given it up.
struct DelegatedMessage {
  c10::weak_intrusive_ptr<SharedMessage> work;
  Piece memory;
  bool writes;
};

}  // namespace sagellm
