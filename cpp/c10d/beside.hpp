// Calls that the core does not order, because a delegate carries them.
#pragma once

#include <vector>

#include "lower/plan.hpp"
#include "work/joined.hpp"

namespace sagellm {

// A call that may be under way, and the memory that it reads or writes. Only the caller owns its Work; a caller who
// drops it no longer waits for the call.
struct DelegatedCall {
  c10::weak_intrusive_ptr<c10d::Work> work;
  std::vector<Strided> touched;
};

}  // namespace sagellm
