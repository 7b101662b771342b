// The copies of one call with tensors on a device, and its Work; `device/staging.hpp` says when they are made.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
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

// The Work of an asynchronous call: it ends when the results of the call on host memory, whose operations it has or
// whose Work it carries, are on the device.
class StagedWork final : public SageWork {
 public:
  StagedWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
             std::unique_ptr<Trace> trace, std::shared_ptr<Transfer> transfer, std::chrono::milliseconds timeout);

  // The call on host memory is a delegate's. One thread waits for it, and ends this one: gloo's works take one waiter
  // only, some backends give theirs no future, and others complete it on their own threads.
  void carry(c10::intrusive_ptr<c10d::Work> inner);

  void abort() override { inner_ ? inner_->abort() : SageWork::abort(); }
  int sourceRank() const override { return inner_ ? inner_->sourceRank() : SageWork::sourceRank(); }
  uint64_t getSequencenumber() const override {
    return inner_ ? inner_->getSequencenumber() : SageWork::getSequencenumber();
  }

 protected:
  bool told_by_core() const override { return false; }
  void parts_ended() override;
  void wait_for_end(const WaitLimit& limit) override;
  void order() const override { transfer_->order(current_stream(transfer_->device)); }
  void on_result_stream(const std::function<void()>& body) const override;

 private:
  // The call on host memory has ended. On any thread that may block; the first one counts.
  void store(std::exception_ptr failure);

  const std::shared_ptr<Transfer> transfer_;
  c10::intrusive_ptr<c10d::Work> inner_;
  // Taken by the thread that stores the results; nothing is ordered by it.
  std::atomic<bool> taken_{false};
};

}  // namespace sagellm
