// The backend as an object: made, timed, watched, ended. The calls that move data are in collectives.cpp and
// dispatch.cpp, groups made out of this one in split_shrink.cpp.
#include "c10d/backend.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "device/vendor.hpp"
#include "host/allocator.hpp"
#include "host/errors.hpp"
#include "host/python_host.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

namespace {

std::string first_reason(const SageBackend::Options& options) {
  if (options.engine == "auto") return {};
  if (options.engine == "delegate") return "the option engine=\"delegate\" asks for it";
  value_error("init", c10::str("the option engine is \"", options.engine, "\", expected \"auto\" or \"delegate\""));
}

int64_t soft_timeout_ms(const SageBackend::Options& options) {
  if (!options.soft_timeout) return -1;
  const double seconds = *options.soft_timeout;
  constexpr double kMost = 1e9;
  if (!(seconds >= 0 && seconds < kMost)) {
    value_error("init", c10::str("the option soft_timeout is ", seconds, " s, expected 0 (none) or more"));
  }
  return static_cast<int64_t>(seconds * 1e3);
}

Decision meet(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const SageBackend::Options& options) {
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
                       c10::intrusive_ptr<SageBackend::Options> options)
    : store_(std::move(store)),
      rank_(rank),
      size_(size),
      options_(std::move(options)),
      decided_(meet(store_, rank, size, *options_)) {}

std::string Rendezvous::tell_failure(const std::string& text) {
  // The first to come says it. A rank that dies in between leaves the place empty; the others then wait until their
  // deadline.
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

void Rendezvous::connect(const std::string& address) {
  const auto timeout = static_cast<uint64_t>(std::max<int64_t>(options_->timeout.count(), 0));
  checked([&] { decided_.rendezvous->connect(address, timeout); });
}

c10::intrusive_ptr<SageBackend> Rendezvous::build(BackendPtr delegate) {
  const bool spans_hosts = decided_.spans_hosts;
  const bool delegated = !decided_.delegate_reason.empty();
  if (built_) value_error("build", "this group was built already");
  if (delegated != static_cast<bool>(delegate)) {
    value_error("build",
                c10::str("the group ", delegated ? "needs a backend that serves it" : "takes no other backend"));
  }
  built_ = true;
  try {
    Built built = RustGroup::build(std::move(decided_.rendezvous));
    SageBackend::Others others{std::move(delegate), delegate_reason(), spans_hosts};
    return c10::make_intrusive<SageBackend>(rank_, size_, options_, std::move(built), store_, std::move(others));
  } catch (const rust::Error& error) {
    if (delegate) delegate->shutdown();
    raise_coded(error.what());
  }
}

SageBackend::SageBackend(int rank, int size, c10::intrusive_ptr<Options> options, Built built,
                         c10::intrusive_ptr<c10d::Store> store, Others others)
    : Backend(rank, size),
      options_(std::move(options)),
      store_(std::move(store)),
      group_(std::move(built.group)),
      description_(std::string(built.description)),
      delegate_reason_(std::move(others.delegate_reason)),
      spans_hosts_(others.spans_hosts),
      delegate_(std::move(others.delegate)) {
  init();
}

SageBackend::~SageBackend() {
  // The last reference may be dropped with the GIL held. Leaving takes a moment in which other threads may need the
  // GIL.
  try {
    if (python_alive() && PyGILState_Check() != 0) {
      const py::gil_scoped_release no_gil;
      shutdown();
    } else {
      shutdown();
    }
  } catch (const py::error_already_set&) {
    // A signal handler raised, but a destructor may not throw, so the exception is reported as an interrupt.
    if (python_alive()) PyErr_SetInterrupt();
  } catch (const std::exception& error) {
    log_line(1, std::string("the end of a group failed: ") + error.what());
  }
}

void SageBackend::refuse_forked() const {
  if (!events_->inherited()) return;
  raise(ErrorKind::kInvalid,
        "sagellm: a forked child cannot use its parent's process group. Start the child with the 'spawn' method");
}

c10::intrusive_ptr<c10d::Backend> SageBackend::delegate() const {
  refuse_forked();
  std::lock_guard<std::mutex> lock(delegate_mutex_);
  if (!delegate_) {
    raise(ErrorKind::kAborted, c10::str("sagellm: the group is served by ", delegate_name(), " (", delegate_reason_,
                                        "), which it released when it was shut down"));
  }
  return delegate_;
}

void SageBackend::setTimeout(std::chrono::milliseconds timeout) {
  if (timeout.count() < 0)
    value_error("set_timeout", c10::str("timeout is ", timeout.count(), " ms, expected 0 or more"));
  if (delegated()) delegate()->setTimeout(timeout);
  options_->timeout = timeout;
  group_->set_timeout(static_cast<uint64_t>(timeout.count()));
}

#ifdef SAGELLM_HAS_EPHEMERAL_TIMEOUT
void SageBackend::addEphemeralTimeout(const std::chrono::milliseconds& more) {
  if (more.count() < 0)
    value_error("add_ephemeral_timeout", c10::str("timeout is ", more.count(), " ms, expected 0 or more"));
  refuse_forked();
  group_->add_ephemeral_timeout(static_cast<uint64_t>(more.count()));
}
#endif

uint64_t SageBackend::getSequenceNumberForGroup() {
  if (delegated()) return delegate()->getSequenceNumberForGroup();
  return group_->state().sequence;
}

std::string SageBackend::fault() const {
  const std::string fault(group_->state().fault);
  return fault.empty() ? fault : fault.substr(1);  // behind the letter of its class
}

c10d::ErrorType SageBackend::getError() {
  if (delegated()) return delegate()->getError();
  const rust::String fault = group_->state().fault;
  if (fault.empty()) return c10d::ErrorType::SUCCESS;
  switch (fault.data()[0]) {
    case 'T':
      return c10d::ErrorType::TIMEOUT;
    case 'D':
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

void SageBackend::leave_to_parent() {
  // Never freed: a forked child has none of the threads that serve these, and their destructors would wait for them. No
  // lock is taken, because a thread of the parent may have held it.
  new auto(std::move(delegate_));
  new auto(std::move(beside_));
  new auto(std::move(delegated_calls_));
}

at::Tensor SageBackend::allocateTensor(long size, at::TensorOptions options) {
  if (size < 0) value_error("allocate_tensor", c10::str("the size is ", size, ", expected a number from 0 on"));
  if (!options.device().is_cpu()) return at::empty({size}, options);
  return shared_tensor({size}, {1}, c10::typeMetaToScalarType(options.dtype()));
}

void SageBackend::shutdown() {
  if (::getpid() != process_) return leave_to_parent();
  decltype(vendors_) vendors;
  {
    const std::lock_guard<std::mutex> lock(vendor_mutex_);
    vendors.swap(vendors_);
  }
  std::exception_ptr interrupted;
  for (const auto& each : vendors) {
    const auto& library = each.second.library;
    if (!library) continue;
    try {
      if (interrupted) {
        library->abort();
      } else {
        library->close(options_->timeout);
      }
    } catch (const std::exception&) {
      if (!interrupted) interrupted = std::current_exception();
    }
  }
  group_->shutdown();
  // A signal handler that raised meanwhile made it return early.
  if (const auto raised = take_interrupt()) interrupted = raised;
  c10::intrusive_ptr<c10d::Backend> split;
  {
    const std::lock_guard<std::mutex> lock(split_mutex_);
    split_store_.reset();
    split.swap(split_child_);
  }
  split.reset();
  c10::intrusive_ptr<c10d::Backend> delegate;
  {
    std::lock_guard<std::mutex> lock(delegate_mutex_);
    delegate.swap(delegate_);
  }
  // Released now: a gloo group that lives into the exit of the process sometimes fails there.
  if (delegate) delegate->shutdown();
  delegate.reset();
  DeferredRelease::instance().release();
  if (interrupted) std::rethrow_exception(interrupted);
}

std::vector<std::shared_ptr<VendorDevices>> SageBackend::opened_vendors() const {
  std::vector<std::shared_ptr<VendorDevices>> found;
  const std::lock_guard<std::mutex> lock(vendor_mutex_);
  for (const auto& each : vendors_) {
    if (each.second.library) found.push_back(each.second.library);
  }
  return found;
}

void SageBackend::abort() {
  abort_for(c10::str("abort() was called on rank ", getRank()));
}

void SageBackend::abort_for(const std::string& reason) {
  if (::getpid() != process_) return;
  events_->call_abort_hooks();
  group_->abort(reason);
  for (const auto& each : opened_vendors()) each->abort();
  std::lock_guard<std::mutex> lock(delegate_mutex_);
  if (delegate_) delegate_->abort();
}

bool SageBackend::supportsCoalescing() const {
  const auto accelerator = at::getAccelerator(false);
  if (accelerator.has_value() && vendor_of(*accelerator)) return true;
  std::lock_guard<std::mutex> lock(delegate_mutex_);
  return delegate_ && delegate_->supportsCoalescing();
}

std::shared_ptr<VendorDevices> SageBackend::vendor_of(c10::DeviceType type) const {
  const std::string& wanted = options_->vendor;
  if (wanted == "host") return nullptr;
  const std::lock_guard<std::mutex> lock(vendor_mutex_);
  const auto found = vendors_.find(type);
  if (found != vendors_.end()) return found->second.library;
  const size_t colon = wanted.find(':');
  const std::string library = colon == std::string::npos ? "" : wanted.substr(colon + 1);
  VendorFound made;
  try {
    auto& self = const_cast<SageBackend&>(*this);
    DeviceOwner owner{*group_,
                      getRank(),
                      getSize(),
                      events_,
                      on_failure(options_->on_device_failure),
                      options_->blocking_wait,
                      [&self](at::Tensor& bytes) { self.broadcast_id(bytes); },
                      [&self](at::Tensor& bytes, int from, int to) { self.pass_id(bytes, from, to); }};
    made.library = std::make_shared<VendorDevices>(std::move(owner), type, wanted.substr(0, colon), library,
                                                   options_->library_folders);
  } catch (const std::exception& error) {
    // A user who names a library gets that one or an error.
    if (wanted != "auto") throw;
    made.missing = error.what();
  }
  return vendors_.emplace(type, std::move(made)).first->second.library;
}

std::string SageBackend::device_library(c10::DeviceType type) const {
  const auto vendor = type == c10::DeviceType::CPU ? nullptr : vendor_of(type);
  return vendor ? vendor->describe() : std::string();
}

void SageBackend::eagerConnectSingleDevice(at::Device device) {
  if (!is_accelerator(device)) return;
  if (const auto vendor = vendor_of(device.type())) vendor->connect(with_index(device));
}

SageBackend::WorkPtr SageBackend::endCoalescing() {
  Region::Content content = region_.end();
  if (!content.plans.empty()) {
    try {
      const auto vendor = vendor_of(content.device->type());
      content.works.push_back(vendor->submit(content.plans, *content.label, std::move(content.keep),
                                             std::move(content.outputs), *content.device, true, true));
    } catch (const std::exception&) {
      auto failed = c10::make_intrusive<SageWork>(getRank(), c10d::OpType::COALESCED, Tensors(), events_, nullptr,
                                                  SageWork::Known{group_->state().sequence, options_->timeout});
      failed->end(std::current_exception());
      content.works.push_back(std::move(failed));
    }
  }
  if (content.works.size() == 1) return content.works[0];
  return c10::make_intrusive<JoinedWork>(getRank(), c10d::OpType::COALESCED, std::move(content.works));
}

void SageBackend::enableCollectivesTiming() {
  if (delegated()) return delegate()->enableCollectivesTiming();
  events_->enable_timing();
}

void SageBackend::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  if (delegated()) return delegate()->registerOnCompletionHook(std::move(hook));
  // The base's copy only answers `hasHooks()`, which destroy_process_group asks before it waits for the hooks.
  onCompletionHook_ = hook;
  events_->set_work_hook(std::move(hook));
}

void SageBackend::waitForPendingWorks() {
  if (::getpid() != process_) return;  // destroy_process_group asks for it, and the works are the parent's
  if (delegated()) return delegate()->waitForPendingWorks();
  // Every operation has a deadline, so this wait ends.
  while (!events_->wait_told(std::chrono::milliseconds(100))) {
    if (check_interrupt()) std::rethrow_exception(take_interrupt());
  }
}

#ifdef SAGELLM_HAS_ABORT_HOOKS
void SageBackend::registerAbortHook(int64_t id, AbortHook hook) {
  events_->abort_hooks.add(id, std::move(hook));
}

void SageBackend::unregisterAbortHook(int64_t id) {
  events_->abort_hooks.remove(id);
}
#endif

#ifdef SAGELLM_HAS_COMPLETION_HOOKS
void SageBackend::registerCompletionHook(int64_t id, CompletionHook hook) {
  if (delegated())
    value_error("register_completion_hook", c10::str("the group is served by ", delegate_name(),
                                                     ", which does not report when its works complete"));
  events_->completion_hooks.add(id, std::move(hook));
}

void SageBackend::unregisterCompletionHook(int64_t id) {
  events_->completion_hooks.remove(id);
}
#endif

}  // namespace sagellm
