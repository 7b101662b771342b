// Converts errors of the core and of the shim to C++ exceptions, which torch turns into Python exceptions. Between the
// core and the shim an error is a text; its first letter is the code of its `ErrorKind`. The functions here make and
// read such texts.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <exception>
#include <optional>
#include <string>

#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

// Error text for a forked child that waits for a Work of its parent.
inline constexpr const char* kInherited =
    "sagellm: a forked child cannot wait for an operation of its parent. Wait for it in the parent";

// Makes a coded error text from a kind and a text.
std::string coded(ErrorKind kind, const std::string& text);

// The text of a coded error text; empty if there is no error.
std::string text_of(const std::string& coded);

// The kind of an error text. No value if the text is empty, which means that there is no error.
std::optional<ErrorKind> kind_of(const std::string& coded);

// kInvalid becomes a ValueError, kInterrupted the exception that Python's signal handler raised, kBug and unknown codes
// a RuntimeError, all others torch's DistBackendError (a RuntimeError).
std::exception_ptr to_exception(const std::string& coded);

// True for exceptions that Python raises to end a program, such as KeyboardInterrupt.
bool is_interrupt(const std::exception_ptr& failure);

// The inverse of `to_exception`, for an exception that did not come from the core. The kind is kRankFailed, because the
// cause is outside of this rank.
std::string coded_text(const std::exception_ptr& failure);

[[noreturn]] void raise(ErrorKind kind, const std::string& text);
// Throws the error of a text that begins with the letter of its kind. The text comes from the core or from `coded`.
[[noreturn]] void raise_coded(const std::string& coded);

// Calls the core and throws its error as an exception.
template <class Call>
auto checked(const Call& call) {
  try {
    return call();
  } catch (const rust::Error& error) {
    raise_coded(error.what());
  }
}

// Throws a ValueError because the call itself is wrong. Nothing was sent and no sequence number was used. `op` is
// torch's name of the call.
[[noreturn]] void value_error(const char* op, const std::string& text);

}  // namespace sagellm
