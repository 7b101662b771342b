// c10d's store as the store of the core (`Store` in host.hpp).
#include <poll.h>

#include <charconv>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "compat.hpp"
#include "host/host.hpp"
#include "host/per_process.hpp"
#include "host/python_host.hpp"

namespace sagellm {

namespace {

// Returns the socket of a client, or -1 if the client's text has none. The text contains "TCPClient(SocketImpl(fd=13,
// ...".
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
      // expected here, so the call changes no key. It is one request, and never waits, even if another rank deletes the
      // key meanwhile. (A `FileStore` whose file was deleted creates it again, as it does at every other request.)
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
  // Set if the user's store is a TCPStore. `prefix_` is then the text that the PrefixStores around it put before a key;
  // the text of the innermost PrefixStore comes first.
  std::shared_ptr<Connection> connection_;
  std::string prefix_;
  // Whether the user's store is a store of torch that implements `compareSet`.
  bool compares_ = false;
};

}  // namespace

std::shared_ptr<Store> wrap_store(const c10::intrusive_ptr<c10d::Store>& store) {
  return std::make_shared<C10dStore>(store);
}

}  // namespace sagellm
