// Splits work of the core among torch's intra-op threads.
#include <ATen/Parallel.h>

#include <algorithm>

#include "host/host.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

size_t intraop_threads() noexcept {
#ifdef INTRA_OP_PARALLEL
  return at::in_parallel_region() ? 1 : static_cast<size_t>(std::max(at::get_num_threads(), 1));
#else
  return 1;
#endif
}

void run_parallel(size_t parts, const ParallelPart& part) noexcept {
  at::parallel_for(0, static_cast<int64_t>(parts), 1, [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) part.run(static_cast<size_t>(number));
  });
}

}  // namespace sagellm
