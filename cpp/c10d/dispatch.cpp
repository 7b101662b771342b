// Decides what carries a call: the CPU's engine, the library of the device's vendor, the CPU's engine with copies in
// host memory, or the delegate. No other file decides this. `lower` makes the same requests for each engine; a delegate
// gets the tensors themselves or, if they are on a device, copies in host memory.
#include <utility>

#include "c10d/backend.hpp"
#include "device/vendor.hpp"
#include "host/errors.hpp"
#include "lower/checks.hpp"
#include "work/callbacks.hpp"
#include "work/steps.hpp"

namespace sagellm {

SageBackend::WorkPtr SageBackend::dispatch(CallDesc& call, CallDesc::Delegate delegate) {
  const InCall in_call;
  call.delegate = delegate;
  if (estimate_.is_here()) return estimated(call);
  const bool in_region = region_.open();
  try {
    return carry(call);
  } catch (const c10::DistBackendError&) {
    if (in_region) region_.refuse(std::current_exception());
    if (group_->state().failed) events_->told();
    throw;
  } catch (...) {
    if (in_region) region_.refuse(std::current_exception());
    throw;
  }
}

SageBackend::WorkPtr SageBackend::carry(CallDesc& call) {
  if (call.names_rows()) {
    if (delegate_.serves()) value_error(call.op, "a delegate serves the group, which cannot pick rows");
    if (call.on_device()) value_error(call.op, "the tensors are on a device, expected the CPU");
  }
  // For an all_reduce, gloo accepts a list that contains a tensor twice; see `add_combined_list`.
  const bool gloo_list = options_->as_gloo && call.kind == Kind::kAllReduce && !call.on_device();
  if (call.coalesced && !call.is_message() && !gloo_list) check::apart(call);
  const bool barrier = call.kind == Kind::kBarrier;
  if (barrier && !delegate_.serves()) {
    refuse_forked(*events_);
    if (auto earlier = sparse_.under_way(); !earlier.empty()) return sparse_.barrier_behind(std::move(earlier), call);
  }
  if (C10_LIKELY(!call.device && !call.on_device())) return on_cpu(call);
  const c10::Device device = barrier ? *call.device : check::device_of(call);
  // The delegate carries the barrier of a delegated group.
  const auto vendor = barrier && delegate_.serves() ? nullptr : vendors_.find(device.type());
  return vendor ? by_vendor(call, device, *vendor) : through_host(call, device);
}

SageBackend::WorkPtr SageBackend::on_cpu(const CallDesc& call) {
  if (delegate_.serves()) return delegate_.carry(call);
  if (C10_UNLIKELY(call.is_sparse_all_reduce())) {
    return sparse_.all_reduce(call, c10::intrusive_ptr<c10d::Backend>::reclaim_copy(this));
  }
  Plans plans = lower(call, own_engine(c10::kCPU));
  return submit(plans, call);
}

SageBackend::WorkPtr SageBackend::through_host(const CallDesc& call, c10::Device device) {
  if (delegate_.serves()) return delegate_.carry_through_host(call, device, staging_);
  Plans plans = lower(call, own_engine(device));
  staging_.wait_for_stream(call.op, device);
  for (Plan& plan : plans) {
    plan.call.note.host_staged = true;
    plan.copies_on = staging_.stream(device);
  }
  return submit(plans, call);
}

SageBackend::WorkPtr SageBackend::estimated(const CallDesc& call) {
  if (call.on_device() || call.is_sparse_all_reduce()) {
    value_error(call.op, "only calls on dense CPU tensors can be estimated");
  }
  for (const Plan& plan : lower(call, own_engine(c10::kCPU))) {
    estimate_.add(checked([&] { return group_->estimate(plan.request()); }));
  }
  if (!call.async) return nullptr;
  const SageWork::Known known{0, options_->timeout};
  auto work = c10::make_intrusive<SageWork>(getRank(), call.label.type, call.outputs.flat(), std::make_shared<Events>(),
                                            nullptr, known);
  work->end(std::exception_ptr());
  return work;
}

// ------------------------------------------------------------------------------------------------ the CPU's engine

SageBackend::WorkPtr SageBackend::submit(Plans& plans, const CallDesc& call) {
  if (region_.open()) {
    // Even a synchronous call does not wait inside a region. The Work that the region's end returns covers it.
    WorkPtr work = submit_async(plans, call, true);
    region_.add(work);
    return call.async ? work : nullptr;
  }
  if (call.async || plans.size() > 1 || has_listeners()) return submit_async(plans, call, call.async);
  run(plans[0], call.label, call.traced());
  return nullptr;
}

void SageBackend::run(Plan& plan, const Label& label, TensorView inputs) {
  DeferredRelease::instance().release();
  CallbackPool::about_to_block();
  const std::unique_ptr<Trace> trace = Trace::start(label.title, inputs);
  // The caller's frame keeps the tensors. Only staged copies need the operation's callbacks.
  std::shared_ptr<Pending> pending;
  if (plan.call.staged) pending = std::make_shared<Pending>(nullptr, Tensors(), plan);
  try {
    plan.run(*group_, pending);
  } catch (const c10::DistBackendError&) {
    events_->call_abort_hooks();
    throw;
  }
  // Drops the references of operations that have ended meanwhile, because the program may make no further call.
  DeferredRelease::instance().release();
  if (trace) trace->end();
  if (pending && !pending->copy_error().empty()) raise_coded(pending->copy_error());
}

SageBackend::WorkPtr SageBackend::submit_async(Plans& plans, const CallDesc& call, bool async) {
  DeferredRelease::instance().release();
  const TensorView inputs = call.traced();
  auto work = c10::make_intrusive<SageWork>(getRank(), call.label.type, call.outputs.flat(), events_,
                                            Trace::start(call.label.title, inputs));
  // The Work keeps the outputs. If the outputs are also the inputs, the tensors need not be kept twice.
  Tensors keep = call.has_one_argument() ? Tensors() : inputs.vec();
  try {
    for (Plan& plan : plans) work->add(*group_, plan, std::exchange(keep, {}));
  } catch (const std::exception&) {
    // The operations that were issued end by themselves. Their Work is not returned, so `seal` reports the failure to
    // the hooks.
    work->seal(coded(ErrorKind::kInvalid, "sagellm: the call could not be issued"));
    throw;
  }
  work->seal();
  // Returned for a synchronous call, too, because hooks identify the call by its Work.
  if (!async) work->wait(kNoTimeout);
  return work;
}

// ------------------------------------------------------------------------------------------------ the vendor's library

SageBackend::WorkPtr SageBackend::by_vendor(const CallDesc& call, c10::Device device, VendorDevices& vendor) {
  Plans plans = lower(call, {getRank(), getSize(), device, true, region_.open()});
  for (const Plan& plan : plans) {
    if (plan.call.root == kAnyRank) {
      value_error(call.op, c10::str("tensors on ", device, " are received by ", vendor.describe(),
                                    ", which cannot receive from any rank; name the source"));
    }
  }
  Tensors outputs = call.outputs.flat();
  Tensors keep = call.inputs.flat();
  keep.insert(keep.end(), outputs.begin(), outputs.end());
  if (region_.open()) {
    region_.add(plans, call.label, std::move(keep), std::move(outputs), device);
    return nullptr;
  }
  return vendor.submit(plans, call.label, std::move(keep), std::move(outputs), device, call.async);
}

}  // namespace sagellm
