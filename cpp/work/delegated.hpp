// The Work of a delegate, wrapped: the core counts it, watches it while it is pending, and names the ranks that it
// lacked when it fails.
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

  // `note` is the core's record of it. It ends with the delegate's future or, where there is none, with the wait, which
  // has this timeout: gloo keeps, for messages, the timeout from when its group was made.
  DelegatedWork(int rank, c10d::OpType type, WorkPtr work, Note note, std::chrono::milliseconds timeout);
  ~DelegatedWork() override;

  // Called where the delegate of this name throws while a call is issued: notes whether it refused the call or the call
  // failed, and throws what is to be reported.
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
  // The delegate's; null where it gives none, as gloo does for messages.
  c10::intrusive_ptr<c10::ivalue::Future> inner_;
  // True once the future has ended well. Written by its callback (release), read by waiting threads (acquire): without
  // a lock, so that a forked child can ask.
  const std::shared_ptr<std::atomic<bool>> done_ = std::make_shared<std::atomic<bool>>(false);
  // Guards `outer_`.
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> outer_;
};

}  // namespace sagellm
