#include "host/host.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <torch/csrc/utils/pybind.h>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "compat.hpp"
#include "host/alarm.hpp"
#include "host/per_process.hpp"
#include "host/python_host.hpp"

namespace sagellm {

namespace {

// The socket of a client, from its text, which contains "TCPClient(SocketImpl(fd=13, ...". -1 if the text has no
// socket.
int socket_of(const c10d::TCPStore& client) {
  const std::string text = store_text(client, 0);
  const std::string before = "SocketImpl(fd=";
  const size_t at = text.find(before);
  int socket = -1;
  if (at != std::string::npos) {
    // If no number follows, `socket` stays -1.
    std::from_chars(text.data() + at + before.size(), text.data() + text.size(), socket);
  }
  return socket;
}

// Our own connection to the server of the user's TCPStore. A connection serves one caller at a time, and another thread
// of the program may block in the user's connection for minutes. One connection is enough for all groups, on whatever
// threads they are made, because none of our requests waits for another rank.
class Connection {
 public:
  explicit Connection(c10::intrusive_ptr<c10d::Store> users) : users_(std::move(users)) {}

  // Calls `request` with the connection, which is opened when it is first needed. Opening may look up a host name, so
  // the caller may hold no lock that other threads need. Requests run one at a time. So between two of them the socket
  // has nothing to read, unless the server has closed it. A closed socket is reported as an error here, because torch
  // would write a page of its stack to the log.
  template <class Request>
  auto use(const Request& request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!own_) {
      own_ = users_->clone();
      const auto* const client = dynamic_cast<c10d::TCPStore*>(own_.get());
      socket_ = client == nullptr ? -1 : socket_of(*client);
    }
    pollfd look{socket_, POLLIN | POLLRDHUP, 0};
    if (socket_ >= 0 && ::poll(&look, 1, 0) > 0) throw std::runtime_error("its server has closed the connection");
    return request(*own_);
  }

 private:
  const c10::intrusive_ptr<c10d::Store> users_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Store> own_;
  int socket_ = -1;
};

// Our connections, by the user's store for which each was made. A connection keeps that store alive, so no other store
// can have the same address meanwhile.
struct Connections {
  std::mutex mutex;
  std::map<const c10d::Store*, std::weak_ptr<Connection>> each;
};

std::shared_ptr<Connection> connection_of(const c10::intrusive_ptr<c10d::Store>& users) {
  Connections& all = per_process<Connections>();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (auto at = all.each.begin(); at != all.each.end();) {
    at = at->second.expired() ? all.each.erase(at) : std::next(at);
  }
  std::weak_ptr<Connection>& known = all.each[users.get()];
  std::shared_ptr<Connection> connection = known.lock();
  if (!connection) {
    connection = std::make_shared<Connection>(users);
    known = connection;
  }
  return connection;
}

// Reads the prefix that a PrefixStore puts before a key. Only a derived class may name the member.
struct PrefixOf : c10d::PrefixStore {
  static const std::string& text(const c10d::PrefixStore& store) { return store.*(&PrefixOf::prefix_); }
};

class C10dStore final : public Store {
  template <class Request>
  auto use(const Request& request) const {
    return connection_ ? connection_->use(request) : request(*users_);
  }

 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : users_(std::move(store)) {
    c10::intrusive_ptr<c10d::Store> inner = users_;
    std::string prefix;
    while (auto* const outer = dynamic_cast<c10d::PrefixStore*>(inner.get())) {
      prefix.insert(0, PrefixOf::text(*outer) + "/");
      inner = outer->getUnderlyingStore();
    }
    compares_ = dynamic_cast<c10d::TCPStore*>(inner.get()) != nullptr ||
                dynamic_cast<c10d::FileStore*>(inner.get()) != nullptr ||
                dynamic_cast<c10d::HashStore*>(inner.get()) != nullptr;
    // Other stores release their lock while a caller waits for a key, so they need no second connection.
    if (dynamic_cast<c10d::TCPStore*>(inner.get()) != nullptr) {
      connection_ = connection_of(inner);
      prefix_ = std::move(prefix);
    }
  }

  void set(rust::Str key, rust::Slice<const uint8_t> value) const override {
    plain_errors([&] {
      use([&](c10d::Store& store) { store.set(full(key), std::vector<uint8_t>(value.begin(), value.end())); });
    });
  }

  bool try_get(rust::Str key, rust::Vec<uint8_t>& value) const override {
    return plain_errors([&] {
      const std::string name = full(key);
      // `compareSet` returns the stored value, or the expected one if the key is missing. No rank ever stores the value
      // expected here, so the call changes no key. It is one request, and it never waits: another rank may delete the
      // key at any time. (A `FileStore` whose file was deleted creates it again, as it does at every other request.)
      static const std::vector<uint8_t> nothing{'n', 'o', 't', ' ', 's', 'e', 't'};
      const std::vector<uint8_t> bytes = use([&](c10d::Store& store) {
        if (compares_) return store.compareSet(name, nothing, nothing);
        // A store of another library may have no `compareSet`. If a rank deletes the key between these two calls, `get`
        // waits until that store's timeout.
        return store.check({name}) ? store.get(name) : nothing;
      });
      if (bytes == nothing) return false;
      value.clear();
      value.reserve(bytes.size());
      for (const uint8_t byte : bytes) value.push_back(byte);
      return true;
    });
  }

  int64_t add(rust::Str key, int64_t by) const override {
    return plain_errors([&] { return use([&](c10d::Store& store) { return store.add(full(key), by); }); });
  }

  void remove(rust::Str key) const override {
    plain_errors([&] { use([&](c10d::Store& store) { (void)store.deleteKey(full(key)); }); });
  }

  size_t connection() const override {
    return connection_ ? reinterpret_cast<size_t>(connection_.get()) : reinterpret_cast<size_t>(users_.get());
  }

 private:
  std::string full(rust::Str key) const { return prefix_ + std::string(key); }

  const c10::intrusive_ptr<c10d::Store> users_;
  // Set if the user's store is a TCPStore. `prefix_` is then the text that its PrefixStores put before a key; the text
  // of the innermost one comes first.
  std::shared_ptr<Connection> connection_;
  std::string prefix_;
  // Whether the user's store is one of those of torch that implement `compareSet`.
  bool compares_ = false;
};

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

thread_local bool outlives_python = false;
std::terminate_handler earlier_handler = nullptr;

[[noreturn]] void sleep_or_terminate() {
  // Sleeps until the main thread has ended the process.
  while (outlives_python && !python_alive()) ::pause();
  if (earlier_handler != nullptr) earlier_handler();
  std::abort();
}

// Python's level of a line: 40 for errors (1) down to 10 for debug lines (4). Finer lines get 5, the package's own
// level.
int python_level(uint8_t level) {
  return level >= 1 && level <= 4 ? 50 - 10 * level : 5;
}

// Used only by the main thread. Never destroyed, because an exception of Python must not be freed after the
// interpreter's end.
std::exception_ptr& kept_interrupt() {
  static auto* const kept = new std::exception_ptr;
  return *kept;
}

// Only the main thread runs signal handlers; on Linux its thread id is the process id.
bool on_main_thread() {
  return ::syscall(SYS_gettid) == ::getpid();
}

}  // namespace

std::shared_ptr<Store> wrap_store(const c10::intrusive_ptr<c10d::Store>& store) {
  return std::make_shared<C10dStore>(store);
}

void outlive_python() {
  static const bool installed = [] {
    earlier_handler = std::set_terminate(&sleep_or_terminate);
    return true;
  }();
  outlives_python = installed;
}

bool check_interrupt() noexcept {
  if (!on_main_thread() || !python_alive()) return false;
  try {
    py::gil_scoped_acquire gil;
    try {
      drain_log();
    } catch (const py::error_already_set&) {
      kept_interrupt() = std::current_exception();
      return true;
    }
    if (PyErr_CheckSignals() == 0) return false;
    kept_interrupt() = std::make_exception_ptr(py::error_already_set());
    return true;
  } catch (const std::exception& error) {
    log_line(1, std::string("looking for signals failed: ") + error.what());
    return false;
  }
}

std::exception_ptr take_interrupt() noexcept {
  return on_main_thread() ? std::exchange(kept_interrupt(), nullptr) : nullptr;
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
