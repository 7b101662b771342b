// The c10d backend. Each override describes its call; dispatch.cpp decides what carries the call. If an engine does,
// `lower` checks the call and makes plain requests of it (several for a list of several types). The other ways to carry
// a call are fields of the backend: a delegate, sparse all-reduces, vendors' libraries, copies in host memory.
//
// If c10d has an old and a new name for a virtual function, the function with the old name is overridden: every
// supported torch has it, and the function with the new name, if torch has one, forwards to it. The lines below name
// the virtual functions of c10d::Backend that are not overridden, and say what each does (a test reads these lines):
//
// inherited: isInitialized: true is right, the creator has connected everything
// inherited: setGroupUid: remembers the name
// inherited: getBoundDeviceId: remembers the device
// inherited: setBoundDeviceId: remembers the device
// refused: getMemAllocator: there is no memory pool
// refused: supportsReconfigure: false
// refused: get_reconfigure_handle: make a new group of the survivors
// refused: reconfigure: make a new group of the survivors
// refused: supportsWindow: false
// refused: new_window: one-sided operations are not offered
// refused: merge: make a new group of the ranks of both
// refused: suspend: there is no memory pool to give back
// refused: resume: there is no memory pool to take again
// refused: getMemoryStats: there is no memory pool to report on
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "c10d/delegate.hpp"
#include "c10d/estimate.hpp"
#include "c10d/group_facts.hpp"
#include "c10d/options.hpp"
#include "c10d/region.hpp"
#include "c10d/sparse.hpp"
#include "c10d/splits.hpp"
#include "c10d/staging.hpp"
#include "c10d/vendors.hpp"
#include "compat.hpp"
#include "host/errors.hpp"
#include "lower/call.hpp"
#include "work/work.hpp"

namespace sagellm {

class SageBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<std::vector<at::Tensor>>;

  using Options = BackendOptions;

  // Made by `Rendezvous::build`. `delegate` carries all calls of a group with a `delegate_reason`, and is null in other
  // groups.
  SageBackend(int rank, int size, c10::intrusive_ptr<Options> options, Built built,
              c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> delegate,
              std::string delegate_reason);
  ~SageBackend() override;

  // Why a delegate serves the group, or empty.
  const std::string& delegate_reason() const { return delegate_.reason(); }
  // Which engine serves the group and why, in one line.
  std::string describe() const { return options_->as_gloo ? description_ + ", asked for as gloo" : description_; }
  // The group's store, for keys besides those of the rendezvous.
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }
  // The other ranks that this rank watches: it detects when one ends.
  std::vector<uint32_t> watched() const {
    const GroupState state = group_->state();
    return {state.watched.begin(), state.watched.end()};
  }
  // The ranks of `watched` that have ended or left the group.
  std::vector<uint32_t> gone() const {
    const GroupState state = group_->state();
    return {state.gone.begin(), state.gone.end()};
  }
  // The core's half of the group, for explanations and statistics. Its errors are texts, so call it through `checked`.
  const RustGroup& core() const { return *group_; }
  // Why tensors on devices of this type travel through host memory.
  std::string device_reason(c10::DeviceType type) const { return vendors_.missing(type); }
  // Description of the library that carries tensors on devices of this type, or empty.
  std::string device_library(c10::DeviceType type) const;

  // Programs that asked for gloo read its name here; `describe` says what serves the group.
  const std::string getBackendName() const override { return options_->as_gloo ? "gloo" : "sagellm"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
#ifdef SAGELLM_HAS_EPHEMERAL_TIMEOUT
  void addEphemeralTimeout(const std::chrono::milliseconds& more) override;
#endif
  uint64_t getSequenceNumberForGroup() override;
  // Sequence numbers begin at the same value on all ranks, so there is nothing to agree on.
  void setSequenceNumberForGroup() override {}
  c10d::ErrorType getError() override;
  // The error with which the whole group failed, or "".
  std::string fault() const;
  // True if the group failed, or if a call of its delegate did, after which the delegate's group may be broken.
  bool has_failed() const { return delegate_.barrier_failed() || group_->state().failed; }
  void shutdown() override;
  void abort() override;

  // torch passes the index of the device for the tensor. The CPU has no index, so a negative index means the CPU.
  bool supportsTensorAlloc(c10::DeviceIndex index) override { return index < 0 && !delegate_.serves(); }
  // A tensor on the CPU is in memory that peers can reach; a tensor on another device is allocated by torch.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  // Returns one answer for all devices of the group: true if a vendor's library carries tensors on this process's
  // accelerator, or if the delegate supports regions. If it is false, torch issues the sends and receives of a batch
  // one by one. On the CPU that costs little, because issuing never waits for a peer, and the program need not obey the
  // rules of regions.
  bool supportsCoalescing() const override;
  void startCoalescing() override { region_.start(); }
  // If the launch fails, the returned Work has the error. If the region was closed because a call in it threw, throws
  // that call's error.
  WorkPtr endCoalescing() override;
  // Call this when the program leaves the region by an exception.
  void drop_region() { region_.drop(); }
  // Between start and end, this thread's calls on CPU tensors are not run. Their times are estimated from the group's
  // own measurements, or by the cost model (`Group::estimate` of the core). `supportsTimeEstimation` is false if a
  // vendor's library or a delegate may carry calls, because the core cannot estimate the time of such a call.
#ifdef SAGELLM_HAS_TIME_ESTIMATION
  bool supportsTimeEstimation() const override;
  void startTimeEstimate() override;
  float endTimeEstimate() override;
#endif
  bool supportsSplitting() const override { return true; }
  // Makes the communicator of a vendor's library now instead of at the first call. The CPU side is already connected.
  void eagerConnectSingleDevice(at::Device device) override;
  // All ranks call this, including ranks that are in no new group.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  bool supportsShrinking() const override { return true; }
  // The remaining ranks call this; the excluded ones may have died. The call ends this group's communicator on the
  // bound device. With the abort flag it does so immediately and aborts all operations of this group. Without the flag
  // it first waits until the operations on the device have ended.
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                                           const c10::intrusive_ptr<c10d::Backend::Options>& opts_override) override;

  void enableCollectivesTiming() override;
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
#ifdef SAGELLM_HAS_ABORT_HOOKS
  void registerAbortHook(int64_t id, AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
#endif
#ifdef SAGELLM_HAS_COMPLETION_HOOKS
  bool supportsAbortHooks() const override { return true; }
  // False for a delegate: its works are not ours, so nothing would call our hooks at their end.
  bool supportsCompletionHooks() const override { return !delegate_.serves(); }
  void registerCompletionHook(int64_t id, CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override;
#endif

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  // An all_to_all of rows: the i-th row that is sent is the row `input_rows[i]` of `input`, and the i-th row that is
  // received is written to the row `output_rows[i]` of `output`. A null pointer means all rows, in order. The split
  // sizes count rows. The tensors are on the CPU, and no delegate serves the group.
  WorkPtr all_to_all_rows(at::Tensor& output, const at::Tensor* output_rows, std::vector<int64_t>& output_splits,
                          at::Tensor& input, const at::Tensor* input_rows, std::vector<int64_t>& input_splits,
                          bool async);
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  // Sends or receives one message that has the bytes of all tensors of the list, in order. The other rank may cut these
  // bytes into other tensors. The tensors are on the CPU, and no delegate serves the group. The caller has checked that
  // the tensors of a receive share no memory.
  WorkPtr send_list(Tensors& tensors, int destination, int tag);
  WorkPtr recv_list(Tensors& tensors, int source, int tag);
  // One message that has the rows `rows` of a tensor, in this order; `tensor` has one element. Throws unless the tensor
  // is on the CPU, no delegate serves the group, and no row is received twice.
  WorkPtr send_rows(Tensors& tensor, const at::Tensor& rows, int destination, int tag);
  WorkPtr recv_rows(Tensors& tensor, const at::Tensor& rows, int source, int tag);

#ifdef SAGELLM_HAS_SINGLE_NAMES
  // The base class forwards these calls as well. But it rejects a call by a thread whose earlier call still waits, and
  // a signal handler may make such a call.
  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return _allgather_base(output, input, opts);
  }
  WorkPtr all_gather_single_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  WorkPtr reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& opts) override {
    return _reduce_scatter_base(output, input, opts);
  }
  WorkPtr reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  WorkPtr all_to_all_single(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    return alltoall_base(output, input, output_splits, input_splits, opts);
  }
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) override {
    return gather_into_tensor(output, input, opts);
  }
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) override;
#endif

 private:
  using TensorView = c10::ArrayRef<at::Tensor>;

  // Called at the end of every override. If no hook is registered and a synchronous call is one request, this thread
  // finishes the call and returns no Work. c10d takes a null Work as "done", and this is the cheapest path.
  WorkPtr dispatch(CallDesc& call, CallDesc::Delegate delegate);
  // Like the function above. If a delegate carries the call, its `method` is called with the tensors of the
  // description, and with `rest` after them.
  template <class... Params, class... Rest>
  WorkPtr dispatch(CallDesc& call, WorkPtr (c10d::Backend::*method)(Params...), Rest&... rest) {
    return dispatch(call, [&](c10d::Backend& other, const CallDesc& with) {
      if constexpr (sizeof...(Params) == sizeof...(Rest) + 2) {
        return (other.*method)(with.outputs, with.inputs, rest...);
      } else {
        return (other.*method)(with.outputs, rest...);
      }
    });
  }
  WorkPtr send_as(Tensors& tensors, int destination, int tag, bool list);
  WorkPtr recv_as(Tensors& tensors, int source, int tag, bool list);
  WorkPtr carry(CallDesc& call);
  // The ways to carry a call.
  WorkPtr on_cpu(const CallDesc& call);
  // Adds the estimated time of the call to this thread's estimation. Returns null, or for an asynchronous call a Work
  // that has ended.
  WorkPtr estimated(const CallDesc& call);
  WorkPtr by_vendor(const CallDesc& call, c10::Device device, VendorDevices& vendor);
  WorkPtr through_host(const CallDesc& call, c10::Device device);

  // Passes the requests of a call to the core. An asynchronous call keeps its inputs alive until it has ended.
  WorkPtr submit(Plans& plans, const CallDesc& call);
  WorkPtr submit_async(Plans& plans, const CallDesc& call, bool async);
  void run(Plan& plan, const Label& label, TensorView inputs);
  // Runs an internal call to its end. The statistics do not count it, and it calls no hooks.
  void run_own(const CallDesc& call, CallDesc::Delegate delegate);

  // Makes a barrier also wait for this rank's collectives on devices. torch does not say which device a barrier is for,
  // unless the caller passes the device's number.
  WorkPtr behind_devices(WorkPtr work, bool async);
  // True if a hook must learn when works end. Then synchronous calls also have a Work.
  bool has_listeners() const { return events_->has_work_hook() || events_->has_completion_hooks(); }

  bool is_root(const CallDesc& call) const { return call.root == getRank(); }
  Carrier own_engine(c10::Device device) const {
    return {getRank(), getSize(), device, false, false, options_->as_gloo};
  }
  // Sends the bytes of a communicator's id over the CPU side, from rank 0 to all ranks. All ranks call this.
  void broadcast_id(at::Tensor& bytes);
  // Sends these bytes from one rank to another. Both ranks call this.
  void pass_id(at::Tensor& bytes, int from, int to);

  GroupFacts facts() const { return {*group_, *options_, events_, getRank(), getSize()}; }
  // What `VendorDevices` needs from this group.
  DeviceOwner device_owner();
  void abort_for(const std::string& reason);
  // Returns true if all ranks pass true. Runs over the CPU side; all ranks call this.
  bool agree(bool yes);
  // The device to which the group is bound, if any. `bound_vendor`: the library that carries tensors on it, or null.
  std::optional<c10::Device> bound_device() const;
  Vendors::Library bound_vendor() const;
  // Makes a group of some ranks of this group, including this rank. `prefix` is the prefix of its keys in the store.
  // `given` are its options, or null; `name` is its name if the options have none.
  c10::intrusive_ptr<SageBackend> part(const std::string& prefix, const std::vector<int>& ranks,
                                       const c10::intrusive_ptr<c10d::Backend::Options>& given,
                                       const std::string& name);

  const c10::intrusive_ptr<Options> options_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const rust::Box<RustGroup> group_;
  const std::string description_;
  const std::shared_ptr<Events> events_ = std::make_shared<Events>();
  Delegate delegate_;
  SparseCalls sparse_{facts()};
  Region region_;
  TimeEstimate estimate_;
  Vendors vendors_{options_, [this] { return device_owner(); }};
  Staging staging_{*options_, vendors_};

  // The device to which the parent group is bound. Kept here, because torch binds no device to a backend that `split`
  // made.
  std::optional<c10::Device> parents_device_;
  // Cleared by `shutdown`.
  Splits splits_;
};

}  // namespace sagellm
