// Where in the caller's program a call comes from: file, line and function of the first Python frame outside torch and
// this package, which `torch_sagellm.observe.sites` numbers. Off unless the environment says SAGELLM_CALL_SITES=1,
// because it takes the GIL for every call.
#pragma once

#include <cstdint>

namespace sagellm {

// The number of the place in the Python program at which this thread is; 0 if call sites are off or there is no such
// place. May run Python code, so a signal handler may raise.
uint32_t call_site();

}  // namespace sagellm
