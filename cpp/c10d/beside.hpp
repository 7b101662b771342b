// Calls that the core does not order, because a delegate carries them.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "lower/plan.hpp"
#include "work/joined.hpp"

namespace sagellm {

// A delegate's message for which several threads may wait: gloo's own work ends the wait of one thread only.
class SharedMessage final : public JoinedWork {
 public:
  SharedMessage(int rank, c10d::OpType type, WorkPtr message)
      : JoinedWork(rank, type, std::vector<WorkPtr>{std::move(message)}) {}

  bool isCompleted() override { return ended() || JoinedWork::isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  bool ended() const { return ended_.load(std::memory_order_acquire); }

 private:
  // Held by the thread that waits for the message; other threads wait for this mutex. Guards `well_`.
  std::mutex waiting_;
  // False where the message was aborted: then every wait returns false, as c10d's contract demands.
  bool well_ = false;
  // True once a wait for it has returned. Written under the mutex (release), read by any thread (acquire).
  std::atomic<bool> ended_{false};
};

// A call that may be under way, and the memory that it reads or writes. Only the caller owns its Work; a caller who
// drops it no longer waits for the call.
struct DelegatedCall {
  c10::weak_intrusive_ptr<c10d::Work> work;
  std::vector<Strided> touched;
};

}  // namespace sagellm
