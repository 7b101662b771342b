// How a group is made: the ranks meet and decide, the Python package connects the ranks or makes a delegate if the
// decision requires it, and the group is built.
#pragma once

#include <string>

#include "c10d/backend.hpp"
#include "c10d/options.hpp"

namespace sagellm {

// The decision of a group's ranks about the engine that serves the group, before the group is built. If it is dropped
// without `build`, the other ranks learn that this rank has left.
class Rendezvous {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

  // Meets the other ranks. Blocks until all have joined, or until the timeout of the options. Call without the GIL.
  Rendezvous(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<BackendOptions> options);

  // Why a delegate must serve the whole group, or empty.
  std::string delegate_reason() const { return std::string(decided_.delegate_reason); }
  // True if the group must be connected between hosts.
  bool spans_hosts() const { return decided_.spans_hosts; }
  // Equal on all ranks, and unique to this attempt to make a group.
  std::string id() const { return std::string(decided_.id); }
  // How the ranks of the group reach each other; see src/rendezvous/addresses.rs.
  std::string network() const { return std::string(decided_.network); }

  // A rank that fails while the ranks connect or make the delegate calls `tell_failure`. The first such rank publishes
  // its error text in the store, and all ranks report that text. Both functions return the published text, or an empty
  // one until it is written. They send requests to the store: call them without the GIL.
  std::string tell_failure(const std::string& text);
  std::string told_failure();

  // Connects to the other ranks of a group that spans hosts. The other ranks reach this process at `address`. `link`
  // says what carries the bytes. Blocks until all ranks have called this, or until the timeout of the options. Call
  // without the GIL.
  void connect(const std::string& address, const std::string& paths, const std::string& link);

  // Builds the group, once. `delegate` is required if there is a reason for one. Call without the GIL.
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
