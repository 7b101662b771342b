// Where in the caller's program a call comes from: file, line and function of the first Python frame outside torch and
// this package, which `torch_sagellm.observe.sites` numbers. Off unless the environment says SAGELLM_CALL_SITES=1,
// because it takes the GIL for every call.
#pragma once

#include <cstdint>

namespace sagellm {

// A number for the place this thread's Python program is at; 0 when that is not looked up or there is none. May run
// Python, whose signal handlers may raise.
uint32_t call_site();

}  // namespace sagellm
