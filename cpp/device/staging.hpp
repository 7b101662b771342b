// Tensors on a device, carried by the engine of the CPU: fetched into host memory, moved or combined there, stored
// back.
//
// A backend's override that finds such tensors makes a `HostCall`, and calls itself with copies in host memory. The
// call is checked and lowered like any other, and arrives at `HostCall::submit` where it would be issued. So every kind
// of call, over every engine and delegate, has one way through host memory.
//
// What is promised about streams: inputs are what the caller's stream has made of them at the call, and results are not
// stored before what it held then has run. A synchronous call returns when the results are on the device. An
// asynchronous one waits at the call for the caller's stream of this rank, never for another rank; its results are
// stored when they are there, on a stream of the group's, whether anyone waits or not; and `wait` puts the caller's
// stream behind them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/streams.hpp"
#include "device/transfer.hpp"
#include "lower/plan.hpp"

namespace sagellm {

class SageBackend;
class VendorDevices;

// The staged calls of one backend that are under way, and what it says about staging.
class Staging {
 public:
  // `why` names what was looked for and not found; `group` is for messages.
  Staging(std::string group, std::string vendor);

  // Why tensors of this kind of device go through host memory.
  std::string reason(c10::DeviceType type) const;
  void set_reason(c10::DeviceType type, const std::string& why);
  // The first staged call of a group is told of, that of a process as a warning.
  void tell(c10::Device device);

  // Enters a call and returns the earlier ones that must have stored their results before it reads or stores.
  std::vector<std::shared_ptr<Transfer>> enter(const std::shared_ptr<Transfer>& transfer);
  // The collectives under way, whose results a barrier comes behind.
  std::vector<std::shared_ptr<Transfer>> collectives();
  const std::shared_ptr<DeviceStreams>& streams() const { return streams_; }

 private:
  const std::string group_;
  const std::string vendor_;
  const std::shared_ptr<DeviceStreams> streams_ = std::make_shared<DeviceStreams>();
  void forget_settled();

  mutable std::mutex mutex_;
  std::map<c10::DeviceType, std::string> reasons_;
  bool told_ = false;
  // In order of issue. A transfer leaves when a later call finds that it is settled.
  std::vector<std::shared_ptr<Transfer>> under_way_;
};

// One call with tensors on a device, while it is issued.
class HostCall {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // `op` is torch's name of the call, for messages.
  HostCall(SageBackend& backend, const char* op) : backend_(backend), op_(op) {}
  // For a barrier, which has no tensors: it comes behind everything on the caller's stream of `device`, and behind the
  // collectives that go through host memory.
  HostCall(SageBackend& backend, const char* op, c10::Device device) : backend_(backend), op_(op), device_(device) {}

  // Copies in host memory for tensors that the call reads, writes, or both. The inputs' numbers come later.
  at::Tensor read(const at::Tensor& tensor) { return add(tensor, true, false); }
  at::Tensor write(const at::Tensor& tensor) { return add(tensor, false, true); }
  at::Tensor update(const at::Tensor& tensor) { return add(tensor, true, true); }
  Tensors read(const Tensors& tensors);
  Tensors write(const Tensors& tensors);
  Tensors update(const Tensors& tensors);
  Lists read(const Lists& lists);
  Lists write(const Lists& lists);

  // Calls the override again, which must come to `current()` on this thread.
  template <class Call>
  WorkPtr run(Call call) {
    const Current mark(this);
    return call();
  }

  // The call that this thread is issuing, or null. Whoever takes it carries it out; a second look finds null.
  static HostCall* current() { return current_; }
  // True while this thread lowers a call that goes to a vendor's library.
  static bool by_vendor() { return C10_UNLIKELY(current_ != nullptr) && current_->vendor_ != nullptr; }
  static HostCall* take() {
    HostCall* found = current_;
    if (C10_UNLIKELY(found != nullptr)) current_ = nullptr;
    return found;
  }

  // Carries the call out on our own engine. `outputs` are copies.
  WorkPtr submit(c10::ArrayRef<Plan*> plans, const Label& label, c10::ArrayRef<at::Tensor> outputs, bool async);
  // For a tensor that the call may not use where it lies: one on the device, as `in_order`.
  at::Tensor stand_in(const at::Tensor& like);
  // Carries it out by a delegate's call, which `hand_over` makes with the copies.
  WorkPtr submit(const std::function<WorkPtr()>& hand_over, c10d::OpType type);

 private:
  // On the stack of the issuing thread.
  class Current {
   public:
    explicit Current(HostCall* call) { current_ = call; }
    ~Current() { current_ = nullptr; }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
  };

  at::Tensor add(const at::Tensor& tensor, bool fetched, bool stored);
  // The tensor itself, or what stands for one whose elements do not lie in order: what checks and lowers a call looks
  // at addresses, sizes and types only.
  at::Tensor in_order(const at::Tensor& tensor, bool fetched, bool stored);
  WorkPtr submit_to_vendor(c10::ArrayRef<Plan*> plans, const Label& label, Tensors outputs, bool async);
  // What both ways have in common, before anything is copied.
  std::shared_ptr<Transfer> start(Transfer::Kind kind);
  // Issues `plans` and, when they have ended, stores the results.
  WorkPtr issue(c10::ArrayRef<Plan*> plans, const Label& label, Tensors outputs,
                const std::shared_ptr<Transfer>& transfer, bool async);
  bool is_barrier() const { return pairs_.empty(); }
  // The inputs where they came from.
  Tensors inputs() const;
  Tensors on_device(c10::ArrayRef<at::Tensor> copies) const;

  // Not `thread_local`: what needs no constructor is found without a check.
  static __thread HostCall* current_;

  SageBackend& backend_;
  const char* const op_;
  std::optional<c10::Device> device_;
  std::vector<Transfer::Pair> pairs_;
  // Set with the first tensor on a device, if its vendor's library carries the call.
  std::shared_ptr<VendorDevices> vendor_;
  bool asked_ = false;
  // On the device: what stands for tensors that are not contiguous, and temporaries.
  std::vector<Staged> strided_before_;
  std::vector<Staged> strided_after_;
  Tensors keep_;
};

// True when one of them is on a device, and the call is not on its way to a vendor's library already.
inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_cpu() && !HostCall::by_vendor();
}
inline bool on_device(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (C10_UNLIKELY(on_device(tensor))) return true;
  }
  return false;
}
inline bool on_device(const std::vector<std::vector<at::Tensor>>& lists) {
  for (const auto& tensors : lists) {
    if (C10_UNLIKELY(on_device(tensors))) return true;
  }
  return false;
}

}  // namespace sagellm
