#include "host/errors.hpp"

#include <torch/csrc/utils/pybind.h>

#include "host/python_host.hpp"

namespace sagellm {

namespace {

// The text has no backtrace: it is for the user, and some code of torch prints all of `what()`.
template <class Kind>
std::exception_ptr make(const std::string& text) {
  return std::make_exception_ptr(Kind(text, nullptr));
}

}  // namespace

std::string coded(ErrorKind kind, const std::string& text) {
  return static_cast<char>(kind) + text;
}

std::string text_of(const std::string& coded) {
  return coded.empty() ? coded : coded.substr(1);
}

std::optional<ErrorKind> kind_of(const std::string& coded) {
  return coded.empty() ? std::nullopt : std::make_optional(static_cast<ErrorKind>(coded[0]));
}

std::exception_ptr to_exception(const std::string& coded) {
  if (coded.empty()) return make<c10::Error>("sagellm: an error without a text");
  const std::string text = text_of(coded);
  switch (static_cast<ErrorKind>(coded[0])) {
    case ErrorKind::kInvalid:
      return make<c10::ValueError>(text);
    case ErrorKind::kTimeout:
    case ErrorKind::kRankFailed:
    case ErrorKind::kMismatch:
    case ErrorKind::kCorrupt:
    case ErrorKind::kAborted:
    case ErrorKind::kSystem:
      return make<c10::DistBackendError>(text);
    case ErrorKind::kInterrupted:
      if (std::exception_ptr kept = take_interrupt()) return kept;
      return make<c10::DistBackendError>(text);
    case ErrorKind::kBug:
      return make<c10::Error>(text);
  }
  return make<c10::Error>("sagellm: an error with an unknown code: " + coded);
}

bool is_interrupt(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (py::error_already_set& error) {
    const py::gil_scoped_acquire gil;
    return !error.matches(PyExc_Exception);
  } catch (...) {
    return false;
  }
}

std::string coded_text(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const c10::Error& error) {
    return coded(ErrorKind::kRankFailed, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return coded(ErrorKind::kRankFailed, error.what());
  }
}

void raise(ErrorKind kind, const std::string& text) {
  raise_coded(coded(kind, text));
}

void raise_coded(const std::string& coded) {
  std::rethrow_exception(to_exception(coded));
}

void value_error(const char* op, const std::string& text) {
  std::rethrow_exception(make<c10::ValueError>(c10::str("sagellm ", op, ": ", text)));
}

}  // namespace sagellm
