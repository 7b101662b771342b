// From errors of the core, and the shim's own, to C++ exceptions that torch turns into Python's. Between the two an
// error is a text whose first letter is its `ErrorKind`; in C++ only this file knows that.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <exception>
#include <optional>
#include <string>

#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

// What a forked child is told that waits for a Work of its parent.
inline constexpr const char* kInherited =
    "sagellm: a forked child cannot wait for an operation of its parent. Wait for it in the parent";

// An error as the core tells it; empty is none.
std::string coded(ErrorKind kind, const std::string& text);

// None where there is no error.
std::optional<ErrorKind> kind_of(const std::string& coded);

// Invalid becomes ValueError, Interrupted the exception that Python's signal handler raised, Bug and everything unknown
// RuntimeError, all others torch's DistBackendError (a RuntimeError).
std::exception_ptr to_exception(const std::string& coded);

// True for what Python raises to end a program, such as KeyboardInterrupt.
bool is_interrupt(const std::exception_ptr& failure);

// The other way, for exceptions that did not come from the core: as what went wrong outside of this rank.
std::string coded_text(const std::exception_ptr& failure);

[[noreturn]] void raise(ErrorKind kind, const std::string& text);
// The same for an error text that already begins with the letter of its kind: the core's, or one that was kept.
[[noreturn]] void raise_coded(const std::string& coded);

// Calls the core; its error is raised.
template <class Call>
auto checked(const Call& call) {
  try {
    return call();
  } catch (const rust::Error& error) {
    raise_coded(error.what());
  }
}

// The call itself is wrong: nothing was sent and no sequence number was used. `op` is torch's name of the call.
[[noreturn]] void value_error(const char* op, const std::string& text);

}  // namespace sagellm
