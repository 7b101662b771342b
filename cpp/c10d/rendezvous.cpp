#include "c10d/rendezvous.hpp"

#include <algorithm>
#include <utility>

#include "device/failure.hpp"
#include "host/errors.hpp"
#include "host/python_host.hpp"

namespace sagellm {

namespace {

std::string first_reason(const BackendOptions& options) {
  if (options.engine == "auto") return {};
  if (options.engine == "delegate") return "the option engine=\"delegate\" asks for it";
  value_error("init", c10::str("the option engine is \"", options.engine, "\", expected \"auto\" or \"delegate\""));
}

int64_t soft_timeout_ms(const BackendOptions& options) {
  if (!options.soft_timeout) return -1;
  const double seconds = *options.soft_timeout;
  constexpr double kMost = 1e9;
  if (!(seconds >= 0 && seconds < kMost)) {
    value_error("init", c10::str("the option soft_timeout is ", seconds, " s, expected 0 (none) or more"));
  }
  return static_cast<int64_t>(seconds * 1e3);
}

Decision meet(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const BackendOptions& options) {
  if (rank < 0 || rank >= size) value_error("init", c10::str("rank is ", rank, " in a group of ", size, " ranks"));
  (void)on_failure(options.on_device_failure);
  Setup setup;
  setup.rank = static_cast<uint32_t>(rank);
  setup.size = static_cast<uint32_t>(size);
  setup.timeout_ms = static_cast<uint64_t>(std::max<int64_t>(options.timeout.count(), 0));
  setup.name = rust::String::lossy(options.group_name);
  setup.delegate_reason = first_reason(options);
  setup.algorithm = rust::String::lossy(options.algorithm);
  setup.topology = rust::String::lossy(options.topology);
  setup.soft_timeout_ms = soft_timeout_ms(options);
  setup.fusion = options.fusion;
  setup.strict = options.strict;
  setup.measure_link = options.measure_link;
  setup.numa = options.numa;
  const int64_t threads = options.threads > 0 ? options.threads : static_cast<int64_t>(intraop_threads());
  setup.threads = options.forked ? 1 : static_cast<uint32_t>(std::clamp<int64_t>(threads, 1, 4096));
  setup.threads_named = options.threads > 0;
  setup.verify = rust::String::lossy(options.verify);
  setup.delegate = rust::String::lossy(options.delegate);
  setup.vendor = rust::String::lossy(options.vendor);
  setup.addresses = rust::String::lossy(options.addresses);
  for (const uint64_t member : options.global_ranks_in_group) setup.members.push_back(static_cast<uint32_t>(member));
  if (setup.members.empty()) {
    for (uint32_t member = 0; member < setup.size; ++member) setup.members.push_back(member);
  }
  return checked([&] { return RustRendezvous::meet(setup, wrap_store(store)); });
}

}  // namespace

Rendezvous::Rendezvous(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                       c10::intrusive_ptr<BackendOptions> options)
    : store_(std::move(store)),
      rank_(rank),
      size_(size),
      options_(std::move(options)),
      decided_(meet(store_, rank, size, *options_)) {}

std::string Rendezvous::tell_failure(const std::string& text) {
  // The first rank to increment the counter publishes its text. If it dies before it has written the text, the other
  // ranks wait for the text until their deadline.
  const auto store = wrap_store(store_);
  if (store->add(failure_key("count"), 1) == 1) {
    store->set(failure_key("text"), {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
    return text;
  }
  return told_failure();
}

std::string Rendezvous::told_failure() {
  rust::Vec<uint8_t> text;
  return wrap_store(store_)->try_get(failure_key("text"), text) ? std::string(text.begin(), text.end()) : "";
}

std::string Rendezvous::failure_key(const char* part) const {
  return c10::str("sagellm/failed/", id(), "/", part);
}

void Rendezvous::connect(const std::string& address, const std::string& paths, const std::string& link) {
  const auto timeout = static_cast<uint64_t>(std::max<int64_t>(options_->timeout.count(), 0));
  const std::vector<rust::String> folders(options_->library_folders.begin(), options_->library_folders.end());
  checked([&] { decided_.rendezvous->connect(address, paths, link, {folders.data(), folders.size()}, timeout); });
}

c10::intrusive_ptr<SageBackend> Rendezvous::build(BackendPtr delegate) {
  const bool delegated = !decided_.delegate_reason.empty();
  if (built_) value_error("build", "this group was built already");
  if (delegated != static_cast<bool>(delegate)) {
    value_error("build",
                c10::str("the group ", delegated ? "needs a backend that serves it" : "takes no other backend"));
  }
  built_ = true;
  try {
    Built built = RustGroup::build(std::move(decided_.rendezvous));
    return c10::make_intrusive<SageBackend>(rank_, size_, options_, std::move(built), store_, std::move(delegate),
                                            delegate_reason());
  } catch (const rust::Error& error) {
    if (delegate) delegate->shutdown();
    raise_coded(error.what());
  }
}

}  // namespace sagellm
