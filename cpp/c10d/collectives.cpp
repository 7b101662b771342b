// The calls that move data, each as one description (lower/call.hpp). dispatch.cpp decides what carries a call.
#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "c10d/backend.hpp"
#include "device/vendor.hpp"
#include "host/errors.hpp"
#include "work/callbacks.hpp"
#include "work/steps.hpp"

namespace sagellm {

using c10d::OpType;
using Other = c10d::Backend;

SageBackend::WorkPtr SageBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  CallDesc call("broadcast", Kind::kBroadcast, {"sagellm:broadcast", OpType::BROADCAST}, opts);
  call.root = opts.rootRank;
  call.root_tensor = opts.rootTensor;
  call.outputs = {tensors, is_root(call) ? Role::kRead : Role::kWrite};
  return dispatch(call, &Other::broadcast, opts);
}

SageBackend::WorkPtr SageBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  CallDesc call("all_reduce", Kind::kAllReduce, {"sagellm:all_reduce", OpType::ALLREDUCE}, opts, &opts.reduceOp);
  call.outputs = {tensors, Role::kUpdate};
  return dispatch(call, &Other::allreduce, opts);
}

SageBackend::WorkPtr SageBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  CallDesc call("all_reduce", Kind::kAllReduce, {"sagellm:all_reduce", OpType::ALLREDUCE}, opts, &opts.reduceOp);
  call.outputs = {tensors, Role::kUpdate};
  return dispatch(call, &Other::allreduce_sparse, opts);
}

SageBackend::WorkPtr SageBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  CallDesc call("all_reduce_coalesced", Kind::kAllReduce, {"sagellm:all_reduce", OpType::ALLREDUCE_COALESCED}, opts,
                &opts.reduceOp);
  call.coalesced = true;
  call.outputs = {tensors, Role::kUpdate};
  return dispatch(call, &Other::allreduce_coalesced, opts);
}

SageBackend::WorkPtr SageBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  CallDesc call("reduce", Kind::kReduce, {"sagellm:reduce", OpType::REDUCE}, opts, &opts.reduceOp);
  call.root = opts.rootRank;
  call.root_tensor = opts.rootTensor;
  call.outputs = {tensors, is_root(call) ? Role::kUpdate : Role::kRead};
  return dispatch(call, &Other::reduce, opts);
}

SageBackend::WorkPtr SageBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  CallDesc call("all_gather", Kind::kAllGather, {"sagellm:all_gather", OpType::ALLGATHER}, opts);
  call.inputs = {inputs, Role::kRead};
  call.outputs = {outputs, Role::kWrite, Blocks::kPerRank};
  return dispatch(call, &Other::allgather, opts);
}

SageBackend::WorkPtr SageBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::AllgatherOptions& opts) {
  CallDesc call("all_gather_into_tensor", Kind::kAllGather, {"sagellm:_all_gather_base", OpType::_ALLGATHER_BASE},
                opts);
  call.inputs = {input, Role::kRead};
  call.outputs = {output, Role::kWrite, Blocks::kEqual};
  return dispatch(call, &Other::_allgather_base, opts);
}

SageBackend::WorkPtr SageBackend::allgather_coalesced(Lists& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
  CallDesc call("all_gather_coalesced", Kind::kAllGather, {"sagellm:all_gather_coalesced", OpType::ALLGATHER_COALESCED},
                opts);
  call.coalesced = true;
  call.inputs = {inputs, Role::kRead};
  call.outputs = {outputs, Role::kWrite, Blocks::kPerRank};
  return dispatch(call, &Other::allgather_coalesced, opts);
}

SageBackend::WorkPtr SageBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const c10d::AllgatherOptions& opts) {
  CallDesc call("all_gather_into_tensor_coalesced", Kind::kAllGather,
                {"sagellm:all_gather_into_tensor_coalesced", kGatherCoalesced}, opts);
  call.coalesced = true;
  call.inputs = {inputs, Role::kRead};
  call.outputs = {outputs, Role::kWrite, Blocks::kEqual};
  return dispatch(call, &Other::allgather_into_tensor_coalesced, opts);
}

SageBackend::WorkPtr SageBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  CallDesc call("gather", Kind::kGather, {"sagellm:gather", OpType::GATHER}, opts);
  call.root = opts.rootRank;
  call.inputs = {inputs, Role::kRead};
  call.outputs = {outputs, Role::kWrite, Blocks::kPerRank};
  return dispatch(call, &Other::gather, opts);
}

SageBackend::WorkPtr SageBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) {
  CallDesc call("scatter", Kind::kScatter, {"sagellm:scatter", OpType::SCATTER}, opts);
  call.root = opts.rootRank;
  call.inputs = {inputs, Role::kRead, Blocks::kPerRank};
  call.outputs = {outputs, Role::kWrite};
  return dispatch(call, &Other::scatter, opts);
}

SageBackend::WorkPtr SageBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                                 const c10d::ReduceScatterOptions& opts) {
  CallDesc call("reduce_scatter", Kind::kReduceScatter, {"sagellm:reduce_scatter", OpType::REDUCE_SCATTER}, opts,
                &opts.reduceOp);
  call.inputs = {inputs, Role::kRead, Blocks::kPerRank};
  call.outputs = {outputs, Role::kWrite};
  return dispatch(call, &Other::reduce_scatter, opts);
}

SageBackend::WorkPtr SageBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::ReduceScatterOptions& opts) {
  CallDesc call("reduce_scatter_tensor", Kind::kReduceScatter,
                {"sagellm:_reduce_scatter_base", OpType::_REDUCE_SCATTER_BASE}, opts, &opts.reduceOp);
  call.inputs = {input, Role::kRead, Blocks::kEqual};
  call.outputs = {output, Role::kWrite};
  return dispatch(call, &Other::_reduce_scatter_base, opts);
}

SageBackend::WorkPtr SageBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const c10d::ReduceScatterOptions& opts) {
  CallDesc call("reduce_scatter_tensor_coalesced", Kind::kReduceScatter,
                {"sagellm:reduce_scatter_tensor_coalesced", kReduceScatterCoalesced}, opts, &opts.reduceOp);
  call.coalesced = true;
  call.inputs = {inputs, Role::kRead, Blocks::kEqual};
  call.outputs = {outputs, Role::kWrite};
  return dispatch(call, &Other::reduce_scatter_tensor_coalesced, opts);
}

SageBackend::WorkPtr SageBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                                const c10d::AllToAllOptions& opts) {
  CallDesc call("all_to_all_single", Kind::kAllToAll, {"sagellm:all_to_all", OpType::ALLTOALL_BASE}, opts);
  call.inputs = {input, Role::kRead, Blocks::kSplits};
  call.outputs = {output, Role::kWrite, Blocks::kSplits};
  call.input_splits = &input_splits;
  call.output_splits = &output_splits;
  return dispatch(call, &Other::alltoall_base, output_splits, input_splits, opts);
}

SageBackend::WorkPtr SageBackend::all_to_all_rows(at::Tensor& output, const at::Tensor* output_rows,
                                                  std::vector<int64_t>& output_splits, at::Tensor& input,
                                                  const at::Tensor* input_rows, std::vector<int64_t>& input_splits,
                                                  bool async) {
  c10d::AllToAllOptions opts;
  opts.asyncOp = async;
  CallDesc call("all_to_all_rows", Kind::kAllToAll, {"sagellm:all_to_all", OpType::ALLTOALL_BASE}, opts);
  call.inputs = {input, Role::kRead, Blocks::kSplits};
  call.inputs.rows = input_rows;
  call.outputs = {output, Role::kWrite, Blocks::kSplits};
  call.outputs.rows = output_rows;
  call.input_splits = &input_splits;
  call.output_splits = &output_splits;
  return dispatch(call, &Other::alltoall_base, output_splits, input_splits, opts);
}

SageBackend::WorkPtr SageBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  CallDesc call("all_to_all", Kind::kAllToAll, {"sagellm:all_to_all", OpType::ALLTOALL}, opts);
  call.inputs = {inputs, Role::kRead, Blocks::kPerRank};
  call.outputs = {outputs, Role::kWrite, Blocks::kPerRank};
  return dispatch(call, &Other::alltoall, opts);
}

namespace {

// The accelerator that a barrier names, if this machine has it. Programs on the CPU pass device ids, too (accelerate
// passes its local rank). torch then names a device of the type for which torch was built, even if the machine has no
// such device.
std::optional<c10::Device> named_device(const c10d::BarrierOptions& opts) {
  std::optional<c10::Device> device = opts.device;
  if (!device && !opts.device_ids.empty()) {
    // torch's dispatcher passes the ids on and drops the device.
    if (const auto type = at::getAccelerator(false))
      device = c10::Device(*type, static_cast<c10::DeviceIndex>(opts.device_ids[0]));
  }
  if (!device || !is_accelerator(*device)) return std::nullopt;
  if (!can_exist(*device)) return std::nullopt;
  const auto found = c10::impl::VirtualGuardImpl(device->type()).deviceCount();
  return device->index() < found && found > 0 ? device : std::nullopt;
}

}  // namespace

SageBackend::WorkPtr SageBackend::barrier(const c10d::BarrierOptions& opts) {
  CallDesc call("barrier", Kind::kBarrier, {"sagellm:barrier", OpType::BARRIER}, opts);
  call.device = named_device(opts);
  const bool behind_all = !call.device;
  if (call.device) call.device = with_index(*call.device);
  WorkPtr work = dispatch(call, [&](Other& other, const CallDesc&) { return other.barrier(opts); });
  return behind_all ? behind_devices(std::move(work), opts.asyncOp) : work;
}

SageBackend::WorkPtr SageBackend::behind_devices(WorkPtr work, bool async) {
  if (region_.open()) return work;
  std::vector<WorkPtr> parts;
  for (const auto& each : vendors_.opened()) {
    if (auto behind = each->behind_all(async)) parts.push_back(std::move(behind));
  }
  if (!async) {
    for (const WorkPtr& part : parts) part->wait(kNoTimeout);
  }
  if (!async || parts.empty()) return work;
  parts.insert(parts.begin(), std::move(work));
  return c10::make_intrusive<JoinedWork>(getRank(), OpType::COALESCED, std::move(parts));
}

void SageBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const InCall in_call;
  if (delegate_.serves()) return delegate_.monitored_barrier(opts, wait_all_ranks);
  CallbackPool::about_to_block();
  checked([&] { group_->monitored_barrier(opts.timeout.count(), wait_all_ranks); });
}

SageBackend::WorkPtr SageBackend::send(Tensors& tensors, int destination, int tag) {
  return send_as(tensors, destination, tag, false);
}

SageBackend::WorkPtr SageBackend::send_list(Tensors& tensors, int destination, int tag) {
  return send_as(tensors, destination, tag, true);
}

SageBackend::WorkPtr SageBackend::send_as(Tensors& tensors, int destination, int tag, bool list) {
  CallDesc call("send", Kind::kSend, {"sagellm:send", OpType::SEND}, destination, tag);
  call.coalesced = list;
  call.outputs = {tensors, Role::kRead};
  return dispatch(call, &Other::send, destination, tag);
}

SageBackend::WorkPtr SageBackend::recv(Tensors& tensors, int source, int tag) {
  return recv_as(tensors, source, tag, false);
}

SageBackend::WorkPtr SageBackend::recv_list(Tensors& tensors, int source, int tag) {
  return recv_as(tensors, source, tag, true);
}

SageBackend::WorkPtr SageBackend::recv_as(Tensors& tensors, int source, int tag, bool list) {
  CallDesc call("recv", Kind::kRecv, {"sagellm:recv", OpType::RECV}, source, tag);
  call.coalesced = list;
  call.outputs = {tensors, Role::kWrite};
  return dispatch(call, &Other::recv, source, tag);
}

SageBackend::WorkPtr SageBackend::send_rows(Tensors& tensor, const at::Tensor& rows, int destination, int tag) {
  CallDesc call("send", Kind::kSend, {"sagellm:send", OpType::SEND}, destination, tag);
  call.outputs = {tensor, Role::kRead};
  call.outputs.rows = &rows;
  return dispatch(call, &Other::send, destination, tag);
}

SageBackend::WorkPtr SageBackend::recv_rows(Tensors& tensor, const at::Tensor& rows, int source, int tag) {
  CallDesc call("recv", Kind::kRecv, {"sagellm:recv", OpType::RECV}, source, tag);
  call.outputs = {tensor, Role::kWrite};
  call.outputs.rows = &rows;
  return dispatch(call, &Other::recv, source, tag);
}

SageBackend::WorkPtr SageBackend::recvAnysource(Tensors& tensors, int tag) {
  CallDesc call("recv", Kind::kRecv, {"sagellm:recvAnySource", OpType::RECVANYSOURCE}, kAnyRank, tag);
  call.outputs = {tensors, Role::kWrite};
  return dispatch(call, &Other::recvAnysource, tag);
}

#ifdef SAGELLM_HAS_SINGLE_NAMES
SageBackend::WorkPtr SageBackend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                     const c10d::GatherOptions& opts) {
  CallDesc call("gather_into_tensor", Kind::kGather, {"sagellm:gather_single", OpType::GATHER}, opts);
  call.root = opts.rootRank;
  call.inputs = {input, Role::kRead};
  // On ranks other than the root the output is a placeholder.
  if (is_root(call)) call.outputs = {output, Role::kWrite, Blocks::kEqual};
  return dispatch(call, [&](c10d::Backend& other, const CallDesc& with) {
    return other.gather_into_tensor(with.outputs.present() ? with.outputs.tensor() : output, with.inputs, opts);
  });
}
#endif

}  // namespace sagellm
