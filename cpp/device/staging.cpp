#include "device/staging.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "c10d/backend.hpp"
#include "device/vendor.hpp"
#include "host/errors.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

Staging::Staging(std::string group, std::string vendor) : group_(std::move(group)), vendor_(std::move(vendor)) {}

std::string Staging::reason(c10::DeviceType type) const {
  if (vendor_ == "host") return "the option vendor=\"host\" asks for it";
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = reasons_.find(type);
  if (found != reasons_.end()) return found->second;
  return c10::str("this build has no engine for ", c10::DeviceTypeName(type, true), " devices");
}

void Staging::set_reason(c10::DeviceType type, const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  reasons_[type] = why;
}

void Staging::tell(c10::Device device) {
  static std::atomic<bool> warned{false};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (told_) return;
    told_ = true;
  }
  constexpr uint8_t kWarning = 2;
  constexpr uint8_t kInfo = 3;
  const std::string text = c10::str("group ", group_, ": tensors on ", device,
                                    " travel through host memory, which is slow: they are copied to the host and back, "
                                    "and the host waits for the device; because ",
                                    reason(device.type()));
  log_line(warned.exchange(true) ? kInfo : kWarning, text);
}

void Staging::forget_settled() {
  under_way_.erase(
      std::remove_if(under_way_.begin(), under_way_.end(), [](const auto& each) { return each->settled(); }),
      under_way_.end());
}

std::vector<std::shared_ptr<Transfer>> Staging::enter(const std::shared_ptr<Transfer>& transfer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  forget_settled();
  std::vector<std::shared_ptr<Transfer>> earlier;
  for (const auto& each : under_way_) {
    if (each->precedes(*transfer)) earlier.push_back(each);
  }
  under_way_.push_back(transfer);
  return earlier;
}

std::vector<std::shared_ptr<Transfer>> Staging::collectives() {
  const std::lock_guard<std::mutex> lock(mutex_);
  forget_settled();
  std::vector<std::shared_ptr<Transfer>> found;
  for (const auto& each : under_way_) {
    if (each->kind == Transfer::Kind::kCollective) found.push_back(each);
  }
  return found;
}

__thread HostCall* HostCall::current_ = nullptr;

at::Tensor HostCall::add(const at::Tensor& tensor, bool fetched, bool stored) {
  // The checks of the call refuse it by name.
  if (!tensor.defined()) return tensor;
  if (device_.has_value() && *device_ != tensor.device()) {
    value_error(op_,
                c10::str("tensors are on ", *device_, " and on ", tensor.device(), ", expected all on one device"));
  }
  device_ = tensor.device();
  if (tensor.device().is_cpu()) return tensor;
  if (!is_accelerator(tensor.device()))
    value_error(op_, c10::str("tensor is on ", tensor.device(), ", which has no data"));
  if (tensor.layout() != at::kStrided) {
    value_error(op_, c10::str("tensor on ", tensor.device(), " has layout ", tensor.layout(),
                              ", expected a dense one (torch.strided)"));
  }
  if (stored && !tensor.is_contiguous() && at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    value_error(op_, c10::str("tensor of sizes ", tensor.sizes(), " and strides ", tensor.strides(),
                              " shares memory between its elements (an expanded tensor?); pass a clone"));
  }
  if (!std::exchange(asked_, true)) vendor_ = backend_.vendor_of(tensor.device().type());
  if (vendor_) return in_order(tensor, fetched, stored);
  at::Tensor host(at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type()));
  pairs_.push_back({tensor, host, fetched, stored});
  return host;
}

at::Tensor HostCall::in_order(const at::Tensor& tensor, bool fetched, bool stored) {
  at::Tensor memory = tensor;
  if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) {
    memory = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
    if (fetched) strided_before_.push_back({memory, tensor});
    if (stored) strided_after_.push_back({memory, tensor});
    keep_.push_back(memory);
  }
  pairs_.push_back({tensor, memory, fetched, stored});
  return memory;
}

at::Tensor HostCall::stand_in(const at::Tensor& like) {
  keep_.push_back(at::empty(like.sizes(), like.options()));
  return keep_.back();
}

HostCall::WorkPtr HostCall::submit_to_vendor(c10::ArrayRef<Plan*> plans, const Label& label, Tensors outputs,
                                             bool async) {
  std::vector<DevicePlan> calls;
  calls.reserve(plans.size());
  for (const Plan* plan : plans) {
    if (plan->call.root == kAnyRank) {
      value_error(op_, c10::str("tensors on ", *device_, " are received by ", vendor_->describe(),
                                ", which cannot receive from any rank; name the source"));
    }
    calls.push_back({plan, plan->before, plan->after});
  }
  // What a plan stages may be what stands for a strided tensor: that comes first, and last on the way back.
  auto& first = calls.front().before;
  first.insert(first.begin(), strided_before_.begin(), strided_before_.end());
  auto& last = calls.back().after;
  last.insert(last.end(), strided_after_.begin(), strided_after_.end());
  Tensors keep;
  keep.reserve(keep_.size() + pairs_.size());
  keep.insert(keep.end(), keep_.begin(), keep_.end());
  for (const auto& pair : pairs_) keep.push_back(pair.device);
  if (backend_.region_.open()) {
    backend_.region_.add(std::move(calls), label, std::move(keep), std::move(outputs), *device_);
    return nullptr;
  }
  return vendor_->submit(calls, label, std::move(keep), std::move(outputs), *device_, async);
}

HostCall::Tensors HostCall::read(const Tensors& tensors) {
  Tensors copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(read(tensor));
  return copies;
}

HostCall::Tensors HostCall::write(const Tensors& tensors) {
  Tensors copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(write(tensor));
  return copies;
}

HostCall::Tensors HostCall::update(const Tensors& tensors) {
  Tensors copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(update(tensor));
  return copies;
}

HostCall::Lists HostCall::read(const Lists& lists) {
  Lists copies;
  for (const Tensors& tensors : lists) copies.push_back(read(tensors));
  return copies;
}

HostCall::Lists HostCall::write(const Lists& lists) {
  Lists copies;
  for (const Tensors& tensors : lists) copies.push_back(write(tensors));
  return copies;
}

HostCall::Tensors HostCall::on_device(c10::ArrayRef<at::Tensor> copies) const {
  Tensors found;
  for (const at::Tensor& copy : copies) {
    const auto pair =
        std::find_if(pairs_.begin(), pairs_.end(), [&](const auto& each) { return each.host.is_same(copy); });
    if (pair != pairs_.end()) found.push_back(pair->device);
  }
  return found;
}

HostCall::Tensors HostCall::inputs() const {
  Tensors found;
  for (const auto& pair : pairs_) {
    if (pair.fetched) found.push_back(pair.device);
  }
  return found;
}

std::shared_ptr<Transfer> HostCall::start(Transfer::Kind kind) {
  const c10::Stream stream = current_stream(*device_);
  // Where torch cannot say, the copy to the host fails in the runtime's own words.
  if (capture_of(stream).value_or(false)) {
    value_error(op_,
                c10::str("the current stream of ", *device_,
                         " is being captured into a graph, which cannot hold a call that travels through host memory (",
                         backend_.staging_.reason(device_->type()), "); make the call outside of the capture"));
  }
  backend_.staging_.tell(*device_);
  Graveyard::instance().drain();
  auto transfer = std::make_shared<Transfer>(*device_, pairs_, kind, backend_.staging_.streams());
  transfer->begin();
  // A barrier comes behind what this rank's stream holds.
  if (is_barrier()) c10::impl::VirtualGuardImpl(device_->type()).synchronizeStream(stream);
  return transfer;
}

HostCall::WorkPtr HostCall::submit(c10::ArrayRef<Plan*> plans, const Label& label, c10::ArrayRef<at::Tensor> outputs,
                                   bool async) {
  if (is_barrier()) vendor_ = backend_.vendor_of(device_->type());
  if (vendor_) return submit_to_vendor(plans, label, on_device(outputs), async);
  const bool message = plans[0]->call.kind >= Kind::kSend;
  const auto transfer = start(message ? Transfer::Kind::kMessage : Transfer::Kind::kCollective);
  try {
    auto earlier = is_barrier() ? backend_.staging_.collectives() : backend_.staging_.enter(transfer);
    const auto beside = std::stable_partition(
        earlier.begin(), earlier.end(), [](const auto& each) { return each->kind != Transfer::Kind::kDelegated; });
    std::for_each(beside, earlier.end(), [](const auto& each) { each->wait_settled(); });
    earlier.erase(beside, earlier.end());
    const bool late = !is_barrier() && !earlier.empty();
    transfer->set_after(std::move(earlier));
    if (!late) transfer->fetch();
    for (Plan* plan : plans) {
      plan->call.host_staged = true;
      for (const auto& pair : pairs_) plan->touch(pair.device, pair.stored);
    }
    if (late) {
      plans[0]->call.staged = true;
      plans[0]->late = [transfer] { transfer->fetch_late(); };
    }
    if (async || plans.size() > 1 || backend_.has_listeners()) {
      return issue(plans, label, on_device(outputs), transfer, async);
    }
    backend_.run(*plans[0], label, inputs());
    transfer->store_earlier();
    transfer->store();
    transfer->order(current_stream(*device_));
  } catch (const std::exception&) {
    transfer->settle();
    throw;
  }
  transfer->settle();
  return nullptr;
}

HostCall::WorkPtr HostCall::issue(c10::ArrayRef<Plan*> plans, const Label& label, Tensors outputs,
                                  const std::shared_ptr<Transfer>& transfer, bool async) {
  const int64_t given = plans[0]->call.timeout_ms;
  const auto timeout = given < 0 ? backend_.options_->timeout : std::chrono::milliseconds(given);
  auto work = c10::make_intrusive<StagedWork>(backend_.getRank(), label.type, std::move(outputs), backend_.events_,
                                              Trace::start(label.title, inputs()), transfer, timeout);
  // Hooks hear of the whole call, not of its middle.
  auto inner =
      c10::make_intrusive<OpWork>(backend_.getRank(), label.type, Tensors(), std::make_shared<Events>(), nullptr);
  work->carry(inner);
  // On a callback thread, when the operation has ended.
  inner->getFuture()->addCallback(
      [work](c10::ivalue::Future& future) { work->ended(future.hasError() ? future.exception_ptr() : nullptr); });
  Tensors keep;
  for (const auto& pair : pairs_) keep.push_back(pair.host);
  try {
    for (Plan* plan : plans) inner->add(*backend_.group_, *plan, std::exchange(keep, {}));
  } catch (const std::exception&) {
    // What was issued ends by itself, and nobody will wait for it; those who watch works hear of the failure.
    inner->seal(coded(ErrorKind::kInvalid, "sagellm: the call could not be issued"));
    throw;
  }
  inner->seal();
  if (!async) work->wait(kNoTimeout);
  return work;
}

HostCall::WorkPtr HostCall::submit(const std::function<WorkPtr()>& hand_over, c10d::OpType type) {
  const auto transfer = start(Transfer::Kind::kDelegated);
  try {
    // A delegate promises no order between operations on the same memory: what is needed is waited for here.
    for (const auto& earlier : backend_.staging_.enter(transfer)) earlier->wait_settled();
    transfer->fetch();
    WorkPtr inner = hand_over();
    if (!inner) {
      transfer->store();
      transfer->order(current_stream(*device_));
      transfer->settle();
      return nullptr;
    }
    Tensors outputs;
    for (const auto& pair : pairs_) {
      if (pair.stored) outputs.push_back(pair.device);
    }
    auto work = c10::make_intrusive<StagedWork>(backend_.getRank(), type, std::move(outputs), backend_.events_, nullptr,
                                                transfer, backend_.options_->timeout);
    work->carry(inner);
    // Not every work of every backend has a future, and those that do complete it on threads of theirs.
    CallbackPool::instance().post([work, inner] {
      std::exception_ptr failure;
      try {
        inner->wait(kNoTimeout);
      } catch (const std::exception&) {
        failure = std::current_exception();
      }
      work->ended(failure);
    });
    return work;
  } catch (const std::exception&) {
    transfer->settle();
    throw;
  }
}

}  // namespace sagellm
