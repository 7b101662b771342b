// Lines of any thread, which a thread that has the GIL writes to Python's logging.
#include <torch/csrc/utils/pybind.h>

#include <cstdio>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include "compat.hpp"
#include "host/alarm.hpp"
#include "host/host.hpp"
#include "host/per_process.hpp"
#include "host/python_host.hpp"

namespace sagellm {

namespace {

// Lines that wait for Python's logging.
struct LogQueue {
  // Bounds the memory if no thread writes the lines. Large enough that no line is dropped while a thread writes them.
  static constexpr size_t kMaxLines = 1000;

  std::mutex mutex;
  std::deque<std::pair<uint8_t, std::string>> lines;  // with their levels
  size_t dropped = 0;
  // True while a pending call of the interpreter is going to drain the queue.
  bool scheduled = false;
  bool closed = false;
};

LogQueue& log_queue() {
  return per_process<LogQueue>();
}

// Python's level of a line: 40 for errors (1) down to 10 for debug lines (4). Finer lines get 5, the package's own
// level.
int python_level(uint8_t level) {
  return level >= 1 && level <= 4 ? 50 - 10 * level : 5;
}

}  // namespace

void log_line(uint8_t level, rust::Str text) noexcept {
  try {
    LogQueue& queue = log_queue();
    std::lock_guard<std::mutex> lock(queue.mutex);
    if (queue.closed || !python_alive()) {
      if (level <= 2) std::fprintf(stderr, "sagellm: %.*s\n", static_cast<int>(text.size()), text.data());
      return;
    }
    if (queue.lines.size() >= LogQueue::kMaxLines) {
      ++queue.dropped;
      return;
    }
    queue.lines.emplace_back(level, std::string(text));
    // `Py_AddPendingCall` needs no GIL and does not wait. It fails if the interpreter's short list of pending calls is
    // full; then the next line tries again.
    const auto drain = [](void* /*unused*/) {
      try {
        drain_log();
      } catch (py::error_already_set& raised) {
        raised.restore();
        return -1;
      }
      return 0;
    };
    if (!queue.scheduled) queue.scheduled = Py_AddPendingCall(drain, nullptr) == 0;
  } catch (const std::exception&) {
    // An operation must not fail because its log line was lost.
  }
}

void drain_log() {
  LogQueue& queue = log_queue();
  decltype(queue.lines) lines;
  size_t dropped = 0;
  {
    std::lock_guard<std::mutex> lock(queue.mutex);
    queue.scheduled = false;
    if (queue.lines.empty()) return;
    lines.swap(queue.lines);
    dropped = std::exchange(queue.dropped, 0);
  }
  if (dropped > 0)
    lines.emplace_back(
        2, std::to_string(dropped) + " log lines were dropped, because no Python thread wrote them in time");
  py::object failure;
  std::exception_ptr interrupt;
  {
    // A signal handler or a caller may have an exception in flight, which logging must neither see nor replace.
    const py::error_scope pending;
    for (const auto& [level, text] : lines) {
      // At any bytecode here Python may raise an exception that is meant for the program: the failure of a call on a
      // device, or what a signal handler raised. Then the line is written once more, and the exception is raised again
      // after all lines.
      for (bool again = true; again;) {
        again = false;
        try {
          const py::object log = py::module_::import("logging").attr("getLogger")("sagellm").attr("log");
          log(python_level(level), "%s", text);
        } catch (py::error_already_set& error) {
          if (!failure && py::hasattr(error.type(), "of_sagellm")) {
            failure = error.type();
            again = true;
          } else if (!interrupt && !error.matches(PyExc_Exception)) {
            interrupt = std::current_exception();
            again = true;
          } else {
            error.discard_as_unraisable("writing sagellm's log");
          }
        }
      }
    }
  }
  if (failure) Alarm::instance().raise_again(failure.ptr());
  if (interrupt) std::rethrow_exception(interrupt);
}

void close_log() {
  LogQueue& queue = log_queue();
  std::lock_guard<std::mutex> lock(queue.mutex);
  queue.closed = true;
}

}  // namespace sagellm
