// Where in the caller's program a call comes from: file, line and function of the first Python frame outside torch and
// this package. Off unless the environment says SAGELLM_CALL_SITES=1, because it takes the GIL for every call.
#pragma once

#include <cstdint>
#include <string>

namespace sagellm {

struct Site {
  std::string file;
  std::string function;
  int line = 0;
};

// A number for the place this thread's Python program is at; 0 when that is not looked up or there is none.
uint32_t call_site();

// The place behind a number; empty for 0 and for numbers nobody gave out.
Site site_of(uint32_t number);

}  // namespace sagellm
