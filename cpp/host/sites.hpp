// Call sites: file, line and function of the first Python frame outside of torch and this package.
// `torch_sagellm.observe.sites` numbers them. Off unless the environment has SAGELLM_CALL_SITES=1, because finding the
// site takes the GIL in every call.
#pragma once

#include <cstdint>

namespace sagellm {

// The number of the place in the Python program that this thread is executing. 0 if call sites are off or there is no
// such place. May run Python code, so a signal handler may raise.
uint32_t call_site();

}  // namespace sagellm
