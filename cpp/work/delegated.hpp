// Wraps the Work of a delegate. The core counts the delegate's call, watches it while it is pending, and names the
// missing ranks when it fails.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "compat.hpp"
#include "sagellm/src/ffi/bridge.rs.h"
#include "work/joined.hpp"

namespace sagellm {

// The messages of a delegated group whose Works the program has dropped before their end. When the Work of a receive is
// destroyed, gloo cancels the receive, and the message that then arrives blocks the connection. So these Works, which
// hold the tensors, are kept until they end or the group does. gloo reports the end of a Work only to a thread that
// waits for it, so one thread of `CallbackPool` waits for the kept Works, one after the other. The messages themselves
// need no thread.
class DroppedMessages : public std::enable_shared_from_this<DroppedMessages> {
 public:
  using WorkPtr = JoinedWork::WorkPtr;

  void keep(WorkPtr work);
  // Ends the waits and drops the Works. Returns when the waiting thread has dropped the last Work, or after 2 seconds.
  // From then on `keep` drops its Work immediately. Call without the GIL.
  void end();
  // Calls `end` for all groups, at the exit of the process.
  static void end_all();

 private:
  struct All;

  void serve();

  std::mutex mutex_;
  std::condition_variable served_;
  // The kept Works. The thread, if there is one, waits for the first of them.
  std::deque<WorkPtr> works_;
  bool serving_ = false;
  bool ended_ = false;
};

class DelegatedWork final : public JoinedWork {
 public:
  using Note = std::shared_ptr<rust::Box<RustExternalOp>>;

  // `note` is the core's record of the call. The record ends with the delegate's future or, if the Work has no future,
  // with the wait. A wait on a Work without a future uses `timeout` if its caller passes none; gloo itself would use
  // the timeout with which its group was made. If the Work of a message is destroyed before a wait, `dropped` gets the
  // message.
  DelegatedWork(int rank, c10d::OpType type, WorkPtr work, Note note, std::chrono::milliseconds timeout,
                std::shared_ptr<DroppedMessages> dropped);
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
  const std::shared_ptr<DroppedMessages> dropped_;
  // True after a wait has ended, with or without an error. Waiting threads write it, and the thread that destroys the
  // Work reads it; the reference count orders the two.
  std::atomic<bool> waited_{false};
  // The delegate's future; null if its Work has none, as is the case for gloo's messages.
  c10::intrusive_ptr<c10::ivalue::Future> inner_;
  // True after the future has completed without an error. Its callback writes it (release), waiting threads read it
  // (acquire). There is no lock, so that a forked child can read it.
  const std::shared_ptr<std::atomic<bool>> done_ = std::make_shared<std::atomic<bool>>(false);
  // Guards `outer_`.
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> outer_;
};

}  // namespace sagellm
