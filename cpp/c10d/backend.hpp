// The c10d backend: each override describes its call; dispatch.cpp checks it, lowers it to one plain request and
// hands it to the engine or delegate that carries it.
//
// The overrides carry c10d's old names, which every supported torch has; where the newer ones exist they forward here.
// What a virtual function of c10d::Backend does that is not overridden below (a test reads these lines):
//
// inherited: isInitialized: true is right, the creator has connected everything
// inherited: setGroupUid: remembers the name
// inherited: getBoundDeviceId: remembers the device
// inherited: setBoundDeviceId: remembers the device
// refused: addEphemeralTimeout: ignored, as c10d allows
// refused: allocateTensor: there is no memory pool yet
// refused: getMemAllocator: there is no memory pool yet
// refused: supportsTensorAlloc: false, there is no memory pool yet
// refused: supportsReconfigure: false
// refused: get_reconfigure_handle: make a new group of the survivors
// refused: reconfigure: make a new group of the survivors
// refused: supportsWindow: false
// refused: new_window: one-sided operations are not offered
// refused: supportsTimeEstimation: false
// refused: startTimeEstimate: there is no simulation of a group
// refused: endTimeEstimate: there is no simulation of a group
// refused: merge: make a new group of the ranks of both
// refused: suspend: there is no memory pool to give back
// refused: resume: there is no memory pool to take again
// refused: getMemoryStats: there is no memory pool to report on
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "c10d/beside.hpp"
#include "c10d/region.hpp"
#include "compat.hpp"
#include "device/streams.hpp"
#include "host/errors.hpp"
#include "host/link.hpp"
#include "lower/call.hpp"
#include "work/work.hpp"

namespace sagellm {

class SageBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<std::vector<at::Tensor>>;

  struct Options final : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
        : c10d::Backend::Options("sagellm", timeout) {}

    c10::intrusive_ptr<Options> copy() const { return c10::make_intrusive<Options>(*this); }
#ifdef SAGELLM_HAS_OPTIONS_CLONE
    c10::intrusive_ptr<c10d::Backend::Options> clone() const override { return copy(); }
#endif

    // "auto", or "delegate" to serve the group by torch's own backend although shared memory would do.
    std::string engine = "auto";
    // The built-in backend that serves what the engine cannot. Read by the Python package, which makes it.
    std::string delegate = "gloo";
    // Rules of which operation goes which way, in the syntax of src/select/rules.rs; they come before those of the
    // environment.
    std::string algorithm;
    // What is known of the machines, as `Topology` of src/select/start.rs reads it; empty where nothing is.
    std::string topology;
    // For groups whose ranks live on several hosts: small operations that wait anyway travel together; every element is
    // combined in the order of the ranks, which gives the bits of one host. The same on all ranks.
    bool fusion = true;
    bool strict = false;
    // How tensors on a device travel: "auto"; "host" for the way through host memory; a vendor's library by its name,
    // or by name and file ("name:/path/to/lib.so").
    std::string vendor = "auto";
    // Where to look for libraries besides the usual places.
    std::vector<std::string> library_folders;
    // The group was asked for under gloo's name: a list of tensors means what it means there.
    bool as_gloo = false;
    // Of the options that a shrink is given: ranks meet only those of the same attempt.
    std::string attempt;
  };

  // Groups of torch's own that were made for this one before it was built.
  struct Others {
    // Carries all calls of a group with a `delegate_reason`, and the messages of one that `spans_hosts`; null in
    // others.
    c10::intrusive_ptr<c10d::Backend> delegate;
    // Between the hosts of one that `spans_hosts`; null in others.
    std::shared_ptr<GlooLink> link;
    std::string delegate_reason;
    bool spans_hosts = false;
  };

  // Made by `Rendezvous::build`.
  SageBackend(int rank, int size, c10::intrusive_ptr<Options> options, Built built,
              c10::intrusive_ptr<c10d::Store> store, Others others);
  ~SageBackend() override;

  // Why the group is served by a delegate, or empty.
  const std::string& delegate_reason() const { return delegate_reason_; }
  // True when ranks live on several hosts, with shared memory inside each.
  bool spans_hosts() const { return spans_hosts_; }
  // Which engine serves the group and why, in one line.
  std::string describe() const { return options_->as_gloo ? description_ + ", asked for as gloo" : description_; }
  // The group's store, for keys beside those of the rendezvous.
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }
  // The other ranks whose end this rank hears of, or those of them that have ended or left.
  std::vector<uint32_t> watched(bool gone) const {
    const GroupState state = group_->state();
    const auto& ranks = gone ? state.gone : state.watched;
    return {ranks.begin(), ranks.end()};
  }
  Explanation explain(const OpDesc& asked) const {
    return checked([&] { return group_->explain(asked); });
  }
  // Why tensors on devices of this kind travel through host memory.
  std::string device_reason(c10::DeviceType type) const;
  // The library that carries tensors on such devices, or empty.
  std::string device_library(c10::DeviceType type) const;
  // What the group has done.
  Stats stats(StatsPart part) const {
    return checked([&] { return group_->stats(part); });
  }

  const std::string getBackendName() const override { return "sagellm"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  uint64_t getSequenceNumberForGroup() override;
  // Numbers begin at the same value everywhere; there is nothing to agree on.
  void setSequenceNumberForGroup() override {}
  c10d::ErrorType getError() override;
  // The error with which the whole group failed, or "".
  std::string fault() const;
  void shutdown() override;
  void abort() override;

  // One answer for all devices of the group: true where a vendor's library carries those of this process. Otherwise a
  // batch of sends and receives is issued one by one; issuing never waits for a peer, so nothing is gained on a CPU
  // that would be worth the rules of regions.
  bool supportsCoalescing() const override;
  void startCoalescing() override { region_.start(); }
  // Never throws: a failure is the Work's.
  WorkPtr endCoalescing() override;
  bool supportsSplitting() const override { return true; }
  // The CPU's ranks have met; those of a vendor's library do so here instead of at their first call.
  void eagerConnectSingleDevice(at::Device device) override;
  // All ranks call it, those in no new group as well.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  bool supportsShrinking() const override { return true; }
  // The ranks that stay call it, whatever has become of the others. This group's communicator of its bound device ends:
  // when what is under way is done, or at once with the flag to abort, which aborts all that this group does.
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
  // A delegate's works are its own; nobody would tell their end.
  bool supportsCompletionHooks() const override { return !delegated(); }
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
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

#ifdef SAGELLM_HAS_SINGLE_NAMES
  // Their base versions forward as well, but refuse to be entered twice on one thread, which a signal handler that
  // runs while the outer call waits would do.
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

  // The last step of every override. A synchronous call is finished on this thread and returns no Work: c10d takes that
  // for "done", and it is the cheapest path.
  WorkPtr dispatch(CallDesc& call, CallDesc::Delegate delegate);
  // The same. A delegate's function is called with the tensors of the description, and with what follows them here.
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
  // The four ways.
  WorkPtr on_cpu(const CallDesc& call);
  WorkPtr by_vendor(const CallDesc& call, c10::Device device, VendorDevices& vendor);
  WorkPtr through_host(const CallDesc& call, c10::Device device);
  // Has the call counted as well: until its future completes, where there is one, which is before anyone who waits goes
  // on.
  WorkPtr by_delegate(const CallDesc& call, bool host_staged = false);

  // Hands the requests of a call to the core. Its inputs are kept alive until an asynchronous call has ended.
  WorkPtr submit(Plans& plans, const CallDesc& call);
  WorkPtr submit_async(Plans& plans, const CallDesc& call, bool async);
  void run(Plan& plan, const Label& label, TensorView inputs);
  void issue(SageWork& work, Plans& plans, Tensors keep);
  // A call of our own to its end. Neither statistics nor hooks hear of it.
  void run_own(const CallDesc& call, CallDesc::Delegate delegate);
  // Issues an operation that is a part of a call; only who has the Work hears of its end.
  c10::intrusive_ptr<SageWork> issue_part(Plan& plan, c10d::OpType type, Tensors keep) const;
  WorkPtr through_host_by_delegate(const CallDesc& call, c10::Device device);
  // Until what the caller's stream holds has run; refuses a stream that is being captured.
  void wait_for_stream(const char* op, c10::Device device);
  // The first staged call of a group is told of, that of a process as a warning.
  void tell_of_staging(c10::Device device);

  // Collectives that the core does not know as a whole, or not at all: a barrier ends behind them.
  WorkPtr beside(WorkPtr work);
  std::vector<WorkPtr> pending_beside();
  WorkPtr barrier_behind(std::vector<WorkPtr> earlier, const CallDesc& call);
  WorkPtr allreduce_coo(const CallDesc& call);
  // Hands a message to the delegate. In a group over several hosts the lanes, which carry its collectives, do not see
  // it: it waits for those before it that use its memory, and those after it wait for it (`follow_delegated`). Here, at
  // issue: the delegate could not be told to begin later.
  WorkPtr delegate_message(const CallDesc& call);
  // Waits for the collectives of the engine that read or write this memory, where either side writes.
  void wait_for_engine(const std::vector<Strided>& touched);
  // The same for calls that the delegate carries, which `add_delegated` has noted.
  void follow_delegated(const std::vector<Strided>& touched);
  void follow_delegated(c10::ArrayRef<Plan> plans);
  void add_delegated(const WorkPtr& work, std::vector<Strided> touched);
  // Has a callback thread run `job`, whose end is that of `work`; waits for it unless the call is asynchronous.
  static WorkPtr in_background(c10::intrusive_ptr<SageWork> work, bool async, std::function<void()> job);

  // A barrier also comes behind the collectives of this rank on devices: torch does not say for which device one is
  // meant unless the caller names its number.
  WorkPtr behind_devices(WorkPtr work, bool async);
  // Somebody listens for the end of works: then synchronous calls have one, too.
  bool has_listeners() const { return events_->has_work_hook() || events_->has_completion_hooks(); }

  // These say who carries tensors in the CPU's memory.
  bool delegated() const { return C10_UNLIKELY(!delegate_reason_.empty()); }
  // Messages of a group over several hosts go by the delegate: a receive from anyone cannot watch two transports.
  bool messages_delegated() const { return delegated() || spans_hosts_; }
  bool is_delegated(const CallDesc& call) const { return delegated() || (spans_hosts_ && call.is_message()); }
  bool is_root(const CallDesc& call) const { return call.root == getRank(); }
  Carrier own_engine(c10::Device device) const {
    return {getRank(), getSize(), device, false, false, options_->as_gloo};
  }
  // What carries tensors on such devices, or null where they go through host memory. Looked for once.
  std::shared_ptr<VendorDevices> vendor_of(c10::DeviceType type) const;
  // Hands bytes from one rank to all (`from` is -1: from rank 0) or to one, over the CPU. Collective calls then.
  void share(at::Tensor& bytes, int from, int to);
  c10::intrusive_ptr<c10d::Backend> delegate() const;

  void abort_for(const std::string& reason);
  // Whether all ranks say yes, over the CPU. All call.
  bool agree(bool yes);
  // The device that the group is bound to, if any, and what carries tensors on it, or null.
  std::optional<c10::Device> bound_device() const;
  std::shared_ptr<VendorDevices> bound_vendor() const;
  // A group of these ranks of this one, this rank among them, whose keys begin with `prefix`. `given` may be null;
  // `name` is for a group to which it gives none.
  c10::intrusive_ptr<SageBackend> part(const std::string& prefix, const std::vector<int>& ranks,
                                       const c10::intrusive_ptr<c10d::Backend::Options>& given,
                                       const std::string& name);
  const c10::intrusive_ptr<Options> options_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const rust::Box<RustGroup> group_;
  const std::string description_;
  const std::string delegate_reason_;
  const bool spans_hosts_;
  const std::shared_ptr<Events> events_ = std::make_shared<Events>();
  // For the copies through host memory.
  DeviceStreams staging_streams_;
  std::atomic<bool> told_of_staging_{false};
  Region region_;
  // What carries tensors on one kind of device: the library of its vendor, or, where that is null, why there is none.
  struct VendorFound {
    std::shared_ptr<VendorDevices> library;
    std::string missing;
  };
  // Guards what was found; looking for it waits for nobody.
  mutable std::mutex vendor_mutex_;
  mutable std::map<c10::DeviceType, VendorFound> vendors_;

  // torch forgets the device of a group that was split off, as far as its backend is concerned.
  std::optional<c10::Device> parents_device_;
  // Guards the next three. The last `split`: torch calls it once for each kind of device that the backend serves (2.15
  // only on ranks outside of the new group), with one store, and wants one new backend. Let go of in the next one and
  // in `shutdown`.
  std::mutex split_mutex_;
  c10::intrusive_ptr<c10d::Store> split_store_;
  c10::intrusive_ptr<c10d::Backend> split_child_;
  // How many there were; the same on all ranks.
  uint64_t splits_ = 0;

  // In a forked child: gives up what is the parent's.
  void leave_to_parent();

  // The process that made this group; in a forked child it is only looked at.
  const pid_t process_ = ::getpid();

  mutable std::mutex delegate_mutex_;
  c10::intrusive_ptr<c10d::Backend> delegate_;
  std::shared_ptr<GlooLink> link_;
  // Guards the next two.
  std::mutex beside_mutex_;
  std::vector<WorkPtr> beside_;
  std::vector<DelegatedCall> delegated_calls_;
  friend struct SparseJob;
  // Numbers the sparse all-reduces of this rank, which gives their messages tags of their own.
  std::atomic<uint32_t> sparse_count_{0};
};

// What the statistics are told of a call that the core does not carry.
ExternalOp external_op(const CallDesc& call, bool host_staged);

// The decision of the ranks of a group about what serves it, before the group is built. Dropping it without `build`
// tells the other ranks that this one leaves.
class Rendezvous {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

  // Meets the other ranks, until all came or the timeout of the options. Call without the GIL.
  Rendezvous(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
             c10::intrusive_ptr<SageBackend::Options> options);

  // Why a delegate must serve the whole group, or empty.
  std::string delegate_reason() const { return std::string(decided_.delegate_reason); }
  // True when the group needs a link between hosts, and a delegate for its messages.
  bool spans_hosts() const { return decided_.spans_hosts; }
  // Equal on all ranks, and of no other attempt to make a group.
  std::string id() const { return std::string(decided_.id); }

  // Builds the group, once. `delegate` where there is a reason for one or the group spans hosts; `link`, a gloo group
  // that nobody else uses, where it spans hosts: all ranks measure it together. Call without the GIL.
  c10::intrusive_ptr<SageBackend> build(BackendPtr delegate, BackendPtr link);

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  const c10::intrusive_ptr<SageBackend::Options> options_;
  Decision decided_;
  // Then its `rendezvous` is gone.
  bool built_ = false;
};

}  // namespace sagellm
