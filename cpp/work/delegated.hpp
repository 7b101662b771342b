// Wraps the Work of a delegate. The core counts it, watches it while it is pending, and names the missing ranks when it
// fails.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "compat.hpp"
#include "sagellm/src/ffi/bridge.rs.h"
#include "work/joined.hpp"

namespace sagellm {

class DelegatedWork final : public JoinedWork {
 public:
  using Note = std::shared_ptr<rust::Box<RustExternalOp>>;

  // `note` is the core's record of the call. The record ends with the delegate's future or, if there is none, with the
  // wait. Such a wait uses `timeout` unless the caller passes one: for messages, gloo itself would use the timeout with
  // which its group was made.
  DelegatedWork(int rank, c10d::OpType type, WorkPtr work, Note note, std::chrono::milliseconds timeout);
  ~DelegatedWork() override;

  // Call this when the delegate throws while a call is issued; `delegate` is its name. Records whether the delegate
  // rejected the call or the call failed, and throws the error to report.
  [[noreturn]] static void not_issued(const Note& note, const std::string& delegate);

  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override {
    if (!inherited()) work_->abort();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return work_->getFutureResult(); }
  float getDuration() const override { return work_->getDuration(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }
#ifdef SAGELLM_HAS_WORK_TIMEOUT
  std::chrono::milliseconds getTimeout() const override { return work_->getTimeout(); }
#endif

 private:
  const WorkPtr work_;
  const Note note_;
  const std::chrono::milliseconds timeout_;
  // The delegate's future; null if its Work has none, as gloo's works of messages.
  c10::intrusive_ptr<c10::ivalue::Future> inner_;
  // True after the future has completed without an error. Its callback writes it (release), waiting threads read it
  // (acquire). There is no lock, so that a forked child can read it.
  const std::shared_ptr<std::atomic<bool>> done_ = std::make_shared<std::atomic<bool>>(false);
  // Guards `outer_`.
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> outer_;
};

}  // namespace sagellm
