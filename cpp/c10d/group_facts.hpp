// What the parts of a backend know of their group. The parts are fields of the backend, which keeps all of this alive.
#pragma once

#include <chrono>
#include <memory>

#include "c10d/options.hpp"
#include "host/errors.hpp"
#include "lower/call.hpp"
#include "work/work.hpp"

namespace sagellm {

// Throws in a forked child. Call it before taking a lock, because a thread of the parent may have held the lock at the
// fork. Calls that the core carries do not need it, because the core rejects them itself.
inline void refuse_forked(const Events& events) {
  if (!events.inherited()) return;
  raise(ErrorKind::kInvalid,
        "sagellm: a forked child cannot use its parent's process group. Start the child with the 'spawn' method");
}

struct GroupFacts {
  const RustGroup& core;
  const BackendOptions& options;
  std::shared_ptr<Events> events;
  int rank;
  int size;

  // The timeout of a call, for its Work.
  std::chrono::milliseconds timeout_of(const CallDesc& call) const {
    return call.timeout.count() < 0 ? options.timeout : call.timeout;
  }
};

}  // namespace sagellm
