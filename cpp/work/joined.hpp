// Several works of any backends as one Work, which forwards calls to them.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "host/per_process.hpp"

namespace sagellm {

class JoinedWork : public c10d::Work {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  JoinedWork(int rank, c10d::OpType type, std::vector<WorkPtr> parts);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return parts_.size() == 1 ? parts_[0]->sourceRank() : Work::sourceRank(); }
  // Waits for the parts one after the other, for at most `timeout` in all. Returns false if the wait of a part returned
  // false, which means that the part was aborted.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override;
  // The future of the values of all parts, concatenated.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 protected:
  // True in a forked child of the process that made this Work. A thread of the parent may have held the Work's locks at
  // the fork.
  bool inherited() const { return process_.inherited(); }

 private:
  const ProcessMark process_;
  const std::vector<WorkPtr> parts_;
  // Guards `value_`.
  std::mutex value_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> value_;
};

}  // namespace sagellm
