// What goes beside the order of the core: calls that a delegate carries.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "lower/plan.hpp"
#include "work/joined.hpp"

namespace sagellm {

// A message of a delegate's that several may wait for: gloo's ends the wait of one of them only.
class SharedMessage final : public JoinedWork {
 public:
  SharedMessage(int rank, c10d::OpType type, WorkPtr message)
      : JoinedWork(rank, type, std::vector<WorkPtr>{std::move(message)}) {}

  bool isCompleted() override { return ended() || JoinedWork::isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  bool ended() const { return ended_.load(std::memory_order_acquire); }

 private:
  // Held by the one that waits; the others wait for it here. Guards `well_`.
  std::mutex waiting_;
  // False where it was aborted: then every wait says so, as c10d's contract has it.
  bool well_ = false;
  // Somebody's wait for it has returned. Written under the mutex (release), read by anyone (acquire).
  std::atomic<bool> ended_{false};
};

// A call that may be under way, and what it reads or writes. Its Work is the caller's: who drops that has given it up.
struct DelegatedCall {
  c10::weak_intrusive_ptr<c10d::Work> work;
  std::vector<Strided> touched;
};

}  // namespace sagellm
