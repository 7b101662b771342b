#include "host/errors.hpp"

#include "host/python_host.hpp"

namespace sagellm {

namespace {

// Without a backtrace: the text is for the user, and some paths of torch print all of `what()`.
template <class Kind>
std::exception_ptr make(const std::string& text) {
  return std::make_exception_ptr(Kind(text, nullptr));
}

}  // namespace

std::exception_ptr to_exception(const std::string& coded) {
  const char code = coded.empty() ? 'B' : coded[0];
  const std::string text = coded.empty() ? "sagellm: an error without a text" : coded.substr(1);
  switch (code) {
    case 'V':
      return make<c10::ValueError>(text);
    case 'T':
    case 'D':
    case 'M':
    case 'A':
    case 'S':
      return make<c10::DistBackendError>(text);
    case 'P':
      if (std::exception_ptr kept = take_interrupt()) return kept;
      return make<c10::DistBackendError>(text);
    case 'B':
      return make<c10::Error>(text);
    default:
      return make<c10::Error>("sagellm: an error with an unknown code: " + coded);
  }
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
    return std::string("D") + error.what_without_backtrace();
  } catch (const std::exception& error) {
    return std::string("D") + error.what();
  }
}

void raise(const std::string& coded) {
  std::rethrow_exception(to_exception(coded));
}

void value_error(const char* op, const std::string& text) {
  std::rethrow_exception(make<c10::ValueError>(c10::str("sagellm ", op, ": ", text)));
}

}  // namespace sagellm
