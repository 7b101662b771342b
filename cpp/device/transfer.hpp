// The copies of one call with tensors on a device, and its Work; `device/staging.hpp` says when they are made.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/streams.hpp"
#include "lower/plan.hpp"
#include "work/work.hpp"

namespace sagellm {

// The copies of one call. Safe to be used by several threads once it has begun.
class Transfer {
 public:
  struct Pair {
    at::Tensor device;
    at::Tensor host;
    bool fetched;
    bool stored;
  };

  // Who keeps the call in order with others on the same memory: the core, or, where a delegate carries it, nobody.
  enum class Kind { kCollective, kMessage, kDelegated };

  // What the stream of this thread, the caller's, holds now comes before everything below.
  Transfer(c10::Device device, std::vector<Pair> pairs, Kind kind, std::shared_ptr<DeviceStreams> streams);

  // Copies the inputs, and waits until they are on the host: on this thread's stream, or on the group's, behind the
  // results of earlier calls, which have ended.
  void fetch();
  void fetch_late();
  // Copies the results and waits until they are on the device. The first caller does it, others wait for that.
  void store();
  // Puts a stream behind `store`.
  void order(const c10::Stream& stream) const { stored_event_.block(stream); }
  c10::Stream side() const { return streams_->side(device); }

  // There is nothing more to come, whether it went well or not. Gives the tensors away, which is for the caller to
  // drop.
  std::vector<at::Tensor> settle();
  bool settled() const;
  // Looks for Python's signals meanwhile.
  void wait_settled() const;

  // True when `other` touches memory that this call stores to, so that it must come after. The core, which is told of
  // the same memory, says so of the same calls: of two that it carries the later one starts when the earlier one has
  // ended.
  bool precedes(const Transfer& other) const;

  const c10::Device device;
  const Kind kind;
  // Earlier calls whose results must be on the device before this one reads or, a barrier, ends. Forgotten when it is
  // settled, or a long row of calls would hold all that went before.
  void set_after(std::vector<std::shared_ptr<Transfer>> earlier);
  void store_earlier() const;

 private:
  const std::shared_ptr<DeviceStreams> streams_;
  std::vector<Pair> pairs_;
  // Memory on the device: all of it, and what is stored to.
  std::vector<Strided> touched_;
  std::vector<Strided> written_;
  c10::Event begin_event_;
  c10::Event stored_event_;
  // Held while tensors are copied, which needs no other lock; guards `pairs_` and the next two.
  std::mutex copy_mutex_;
  bool stored_ = false;
  std::exception_ptr store_failure_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<std::shared_ptr<Transfer>> after_;
  bool settled_ = false;
};

// The Work of an asynchronous call: that of the call on host memory, and then the way back.
class StagedWork final : public SageWork {
 public:
  StagedWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
             std::unique_ptr<Trace> trace, std::shared_ptr<Transfer> transfer, std::chrono::milliseconds timeout);

  // The call on host memory, which may have ended already or may be issued yet. A delegate's is waited for by one
  // thread that calls `ended`: gloo's works take one waiter only.
  void carry(c10::intrusive_ptr<c10d::Work> inner) {
    inner_ = std::move(inner);
    // Not torch's dynamic cast of the pointer, which keeps a reference for ever where it is none.
    if (auto* const own = dynamic_cast<OpWork*>(inner_.get())) own_ = c10::intrusive_ptr<OpWork>::reclaim_copy(own);
  }
  // It has ended. On any thread that may block; the first call counts.
  void ended(std::exception_ptr failure);

  bool isCompleted() override { return done(); }
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override { inner_->abort(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::exception_ptr exception() const override;
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }
#ifdef SAGELLM_HAS_WORK_TIMEOUT
  std::chrono::milliseconds getTimeout() const override { return timeout_; }
#endif
  std::vector<Explanation> explain() const override;

 protected:
  bool done() const override;
  std::string error() const override;
  std::chrono::nanoseconds duration() const override;
  void on_result_stream(const std::function<void()>& body) const override;

 private:
  const std::shared_ptr<Transfer> transfer_;
  const std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::Work> inner_;
  // The same where it is ours, else null.
  c10::intrusive_ptr<OpWork> own_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  // Guarded by the base's `mutex_`, as are its `completed_` and `exception_`. `taken_`: somebody stores the results.
  bool taken_ = false;
  std::chrono::steady_clock::time_point ended_at_;
  std::string text_;
};

}  // namespace sagellm
