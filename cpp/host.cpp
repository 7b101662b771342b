#include "host.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "per_process.hpp"
#include "python_host.hpp"

namespace sagellm {

namespace {

class C10dStore final : public Store {
 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(rust::Str key, rust::Slice<const uint8_t> value) const override {
    plain_errors([&] { store_->set(std::string(key), std::vector<uint8_t>(value.begin(), value.end())); });
  }

  bool try_get(rust::Str key, rust::Vec<uint8_t>& value) const override {
    bool found = false;
    plain_errors([&] {
      const std::string name(key);
      // `get` waits for a key that is missing, so ask first. Nobody deletes keys.
      found = store_->check({name});
      if (!found) return;
      const std::vector<uint8_t> bytes = store_->get(name);
      value.clear();
      value.reserve(bytes.size());
      for (const uint8_t byte : bytes) value.push_back(byte);
    });
    return found;
  }

  int64_t add(rust::Str key, int64_t by) const override {
    int64_t sum = 0;
    plain_errors([&] { sum = store_->add(std::string(key), by); });
    return sum;
  }

 private:
  // cxx hands `what()` to Rust and knows only std::exception; torch's text carries a C++ backtrace nobody asked for.
  template <class Body>
  static void plain_errors(const Body& body) {
    try {
      body();
    } catch (const c10::Error& error) {
      throw std::runtime_error(error.what_without_backtrace());
    } catch (const std::exception&) {
      throw;
    } catch (...) {
      throw std::runtime_error("unknown error");
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
};

struct Line {
  uint8_t level;
  std::string text;
};

// Lines on their way to Python's logging.
struct LogQueue {
  // More than this is kept from nobody who reads along, and bounds the memory when nobody does.
  static constexpr size_t kMaxLines = 1000;

  std::mutex mutex;
  std::deque<Line> lines;
  size_t dropped = 0;
  // A pending call of the interpreter will drain the queue.
  bool scheduled = false;
  bool closed = false;
};

LogQueue& log_queue() {
  return per_process<LogQueue>();
}

int drain_from_main_loop(void* /*unused*/) {
  drain_log();
  return 0;
}

int python_level(uint8_t level) {
  switch (level) {
    case 1:
      return 40;
    case 2:
      return 30;
    case 3:
      return 20;
    case 4:
      return 10;
    default:
      return 5;
  }
}

thread_local std::exception_ptr kept_interrupt;

// Only the main thread runs signal handlers; on Linux its thread id is the process id.
bool on_main_thread() {
  return ::syscall(SYS_gettid) == ::getpid();
}

}  // namespace

std::shared_ptr<Store> wrap_store(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    return std::make_shared<C10dStore>(store->clone());
  } catch (const std::exception&) {
    // Stores written in Python need not offer it.
    return std::make_shared<C10dStore>(store);
  }
}

bool check_interrupt() noexcept {
  if (!on_main_thread() || !python_alive()) return false;
  try {
    py::gil_scoped_acquire gil;
    drain_log();
    if (PyErr_CheckSignals() == 0) return false;
    kept_interrupt = std::make_exception_ptr(py::error_already_set());
    return true;
  } catch (const std::exception& error) {
    log_line(1, std::string("looking for signals failed: ") + error.what());
    return false;
  }
}

std::exception_ptr take_interrupt() noexcept {
  return std::exchange(kept_interrupt, nullptr);
}

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
    queue.lines.push_back({level, std::string(text)});
    // Needs no GIL and does not wait; fails when the interpreter's short list is full, then the next line asks again.
    if (!queue.scheduled) queue.scheduled = Py_AddPendingCall(&drain_from_main_loop, nullptr) == 0;
  } catch (const std::exception&) {
    // A log line is not worth more than the operation that wrote it.
  }
}

void drain_log() {
  LogQueue& queue = log_queue();
  std::deque<Line> lines;
  size_t dropped = 0;
  {
    std::lock_guard<std::mutex> lock(queue.mutex);
    queue.scheduled = false;
    if (queue.lines.empty()) return;
    lines.swap(queue.lines);
    dropped = std::exchange(queue.dropped, 0);
  }
  if (dropped > 0) lines.push_back({2, std::to_string(dropped) + " log lines were dropped, nobody read them in time"});
  // A signal handler or a caller may have an exception in flight; logging must neither see nor replace it.
  const py::error_scope pending;
  try {
    const py::object log = py::module_::import("logging").attr("getLogger")("sagellm").attr("log");
    for (const Line& line : lines) log(python_level(line.level), "%s", line.text);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("writing sagellm's log");
  }
}

void close_log() {
  LogQueue& queue = log_queue();
  std::lock_guard<std::mutex> lock(queue.mutex);
  queue.closed = true;
}

}  // namespace sagellm
