// How a group is made: the ranks meet and decide, Python opens what the decision needs, and the group is built.
#pragma once

#include <string>

#include "c10d/backend.hpp"
#include "c10d/options.hpp"

namespace sagellm {

// The decision of the ranks of a group about the engine that serves it, before the group is built. Dropping it without
// `build` tells the other ranks that this one leaves.
class Rendezvous {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

  // Meets the other ranks, until all came or the timeout of the options. Call without the GIL.
  Rendezvous(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<BackendOptions> options);

  // Why a delegate must serve the whole group, or empty.
  std::string delegate_reason() const { return std::string(decided_.delegate_reason); }
  // True when the group must be connected.
  bool spans_hosts() const { return decided_.spans_hosts; }
  // Equal on all ranks, and unique to this attempt to make a group.
  std::string id() const { return std::string(decided_.id); }
  // How the ranks reach each other; see src/rendezvous/addresses.rs.
  std::string network() const { return std::string(decided_.network); }

  // While the ranks connect or create the delegate, a rank that fails publishes its error in the store. All ranks
  // report the text of the first rank that did so; both functions return it. It may be empty for a moment, until that
  // rank has written it. Requests to the store: call without the GIL.
  std::string tell_failure(const std::string& text);
  std::string told_failure();

  // Connects to the other ranks of a group that spans hosts, which reach this process at `address`. Blocks until all
  // have called it, or the timeout of the options. Call without the GIL.
  void connect(const std::string& address);

  // Builds the group, once. `delegate` is needed where there is a reason for one. Call without the GIL.
  c10::intrusive_ptr<SageBackend> build(BackendPtr delegate);

 private:
  std::string failure_key(const char* part) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  const c10::intrusive_ptr<BackendOptions> options_;
  Decision decided_;
  // True once `build` has consumed the decision.
  bool built_ = false;
};

}  // namespace sagellm
