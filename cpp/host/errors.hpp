// From the core's coded texts to C++ exceptions that torch turns into Python's.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <exception>
#include <string>

namespace sagellm {

// The first letter is the code of `src/error.rs`: V becomes ValueError, T, D, M, A and S torch's DistBackendError (a
// RuntimeError), P the exception that Python's signal handler raised, B and everything else RuntimeError.
std::exception_ptr to_exception(const std::string& coded);

// True for what Python raises to end a program, such as KeyboardInterrupt.
bool is_interrupt(const std::exception_ptr& failure);

// The other way, for exceptions that did not come from the core: as what went wrong outside of this rank.
std::string coded_text(const std::exception_ptr& failure);

[[noreturn]] void raise(const std::string& coded);

// The call itself is wrong: nothing was sent and no sequence number was used. `op` is torch's name of the call.
[[noreturn]] void value_error(const char* op, const std::string& text);

}  // namespace sagellm
