// The backend as an object: construction, timeouts, errors, hooks, shutdown. The calls that move data are in
// collectives.cpp and dispatch.cpp; split_shrink.cpp makes groups out of this one.
#include "c10d/backend.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "device/vendor.hpp"
#include "host/allocator.hpp"
#include "host/errors.hpp"
#include "host/python_host.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

SageBackend::SageBackend(int rank, int size, c10::intrusive_ptr<Options> options, Built built,
                         c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> delegate,
                         std::string delegate_reason)
    : Backend(rank, size),
      options_(std::move(options)),
      store_(std::move(store)),
      group_(std::move(built.group)),
      description_(std::string(built.description)),
      delegate_(facts(), std::move(delegate), std::move(delegate_reason)) {
  init();
}

SageBackend::~SageBackend() {
  // The last reference may be dropped with the GIL held. Leaving the group takes a while, and other threads may need
  // the GIL meanwhile, so the GIL is released.
  try {
    if (python_alive() && PyGILState_Check() != 0) {
      const py::gil_scoped_release no_gil;
      shutdown();
    } else {
      shutdown();
    }
  } catch (const py::error_already_set&) {
    // A signal handler raised, but a destructor must not throw. So Python gets a simulated SIGINT instead.
    if (python_alive()) PyErr_SetInterrupt();
  } catch (const std::exception& error) {
    log_line(1, std::string("the end of a group failed: ") + error.what());
  }
}

void SageBackend::setTimeout(std::chrono::milliseconds timeout) {
  if (timeout.count() < 0)
    value_error("set_timeout", c10::str("timeout is ", timeout.count(), " ms, expected 0 or more"));
  if (delegate_.serves()) delegate_.backend()->setTimeout(timeout);
  options_->timeout = timeout;
  group_->set_timeout(static_cast<uint64_t>(timeout.count()));
}

#ifdef SAGELLM_HAS_EPHEMERAL_TIMEOUT
void SageBackend::addEphemeralTimeout(const std::chrono::milliseconds& more) {
  if (more.count() < 0)
    value_error("add_ephemeral_timeout", c10::str("timeout is ", more.count(), " ms, expected 0 or more"));
  refuse_forked(*events_);
  group_->add_ephemeral_timeout(static_cast<uint64_t>(more.count()));
}
#endif

uint64_t SageBackend::getSequenceNumberForGroup() {
  if (delegate_.serves()) return delegate_.backend()->getSequenceNumberForGroup();
  return group_->state().sequence;
}

std::string SageBackend::fault() const {
  return text_of(std::string(group_->state().fault));
}

c10d::ErrorType SageBackend::getError() {
  if (delegate_.serves()) return delegate_.backend()->getError();
  const auto kind = kind_of(std::string(group_->state().fault));
  if (!kind) return c10d::ErrorType::SUCCESS;
  if (kind == ErrorKind::kTimeout) return c10d::ErrorType::TIMEOUT;
  if (kind == ErrorKind::kRankFailed) return c10d::ErrorType::REMOTE_ERROR;
  return c10d::ErrorType::COMM_ERROR;
}

at::Tensor SageBackend::allocateTensor(long size, at::TensorOptions options) {
  if (size < 0) value_error("allocate_tensor", c10::str("the size is ", size, ", expected a number from 0 on"));
  if (!options.device().is_cpu()) return at::empty({size}, options);
  return shared_tensor({size}, {1}, c10::typeMetaToScalarType(options.dtype()));
}

void SageBackend::shutdown() {
  if (events_->inherited()) {
    delegate_.leave_to_parent();
    sparse_.leave_to_parent();
    return;
  }
  const std::vector<Vendors::Library> vendors = vendors_.take();
  std::exception_ptr interrupted = failure_of([&] { close_all(vendors, options_->timeout); });
  group_->shutdown();
  // If a signal handler raised meanwhile, `shutdown` of the core has returned early.
  if (const auto raised = take_interrupt()) interrupted = raised;
  splits_.clear();
  delegate_.shutdown();
  DeferredRelease::instance().release();
  if (interrupted) std::rethrow_exception(interrupted);
}

void SageBackend::abort() {
  abort_for(c10::str("abort() was called on rank ", getRank()));
}

void SageBackend::abort_for(const std::string& reason) {
  if (events_->inherited()) return;
  events_->call_abort_hooks();
  group_->abort(reason);
  for (const auto& each : vendors_.opened()) each->abort();
  delegate_.abort();
}

bool SageBackend::supportsCoalescing() const {
  const auto accelerator = at::getAccelerator(false);
  if (accelerator.has_value() && vendors_.find(*accelerator)) return true;
  return delegate_.supports_coalescing();
}

#ifdef SAGELLM_HAS_TIME_ESTIMATION
bool SageBackend::supportsTimeEstimation() const {
  const auto accelerator = at::getAccelerator(false);
  return !delegate_.serves() && !(accelerator.has_value() && vendors_.find(*accelerator));
}

void SageBackend::startTimeEstimate() {
  if (!supportsTimeEstimation()) return c10d::Backend::startTimeEstimate();
  if (!estimate_.begin()) value_error("start_time_estimate", "an estimation is running in this group");
}

float SageBackend::endTimeEstimate() {
  if (!estimate_.is_here()) value_error("end_time_estimate", "this thread has not started an estimation in this group");
  return estimate_.end();
}
#endif

DeviceOwner SageBackend::device_owner() {
  return {*group_,
          getRank(),
          getSize(),
          events_,
          on_failure(options_->on_device_failure),
          options_->blocking_wait,
          [this](at::Tensor& bytes) { broadcast_id(bytes); },
          [this](at::Tensor& bytes, int from, int to) { pass_id(bytes, from, to); }};
}

std::string SageBackend::device_library(c10::DeviceType type) const {
  const auto vendor = type == c10::DeviceType::CPU ? nullptr : vendors_.find(type);
  return vendor ? vendor->describe() : std::string();
}

void SageBackend::eagerConnectSingleDevice(at::Device device) {
  if (!is_accelerator(device)) return;
  if (const auto vendor = vendors_.find(device.type())) vendor->connect(with_index(device));
}

SageBackend::WorkPtr SageBackend::endCoalescing() {
  Region::Content content = region_.end();
  if (!content.plans.empty()) {
    try {
      const auto vendor = vendors_.find(content.device->type());
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
  if (delegate_.serves()) return delegate_.backend()->enableCollectivesTiming();
  events_->enable_timing();
}

void SageBackend::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  if (delegate_.serves()) return delegate_.backend()->registerOnCompletionHook(std::move(hook));
  // The base class's copy only answers `hasHooks()`, which destroy_process_group calls before it waits for the hooks.
  onCompletionHook_ = hook;
  events_->set_work_hook(std::move(hook));
}

void SageBackend::waitForPendingWorks() {
  if (events_->inherited()) return;  // a forked child in destroy_process_group: the parent owns the works
  if (delegate_.serves()) return delegate_.backend()->waitForPendingWorks();
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
  if (delegate_.serves())
    value_error("register_completion_hook", c10::str("the group is served by ", delegate_.name(),
                                                     ", which does not report when its works complete"));
  events_->completion_hooks.add(id, std::move(hook));
}

void SageBackend::unregisterCompletionHook(int64_t id) {
  events_->completion_hooks.remove(id);
}
#endif

}  // namespace sagellm
