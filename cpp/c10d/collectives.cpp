// The calls that move data, each as one description (lower/call.hpp); dispatch.cpp decides who carries it.
#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "c10d/backend.hpp"
#include "device/vendor.hpp"
#include "host/errors.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

using c10d::OpType;
using Other = c10d::Backend;

SageBackend::WorkPtr SageBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  CallDesc call("broadcast", Kind::kBroadcast, {"sagellm:broadcast", OpType::BROADCAST}, opts);
  call.root = opts.rootRank;
  call.root_tensor = opts.rootTensor;
  call.outputs = Operand(tensors, is_root(call) ? Role::kRead : Role::kWrite);
  return dispatch(call, [&](Other& other, const CallDesc& with) { return other.broadcast(with.outputs.list(), opts); });
}

SageBackend::WorkPtr SageBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  CallDesc call("all_reduce", Kind::kAllReduce, {"sagellm:all_reduce", OpType::ALLREDUCE}, opts);
  call.outputs = Operand(tensors, Role::kUpdate);
  call.reduce_op = &opts.reduceOp;
  return dispatch(call, [&](Other& other, const CallDesc& with) { return other.allreduce(with.outputs.list(), opts); });
}

SageBackend::WorkPtr SageBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  CallDesc call("all_reduce", Kind::kAllReduce, {"sagellm:all_reduce", OpType::ALLREDUCE}, opts);
  call.outputs = Operand(tensors, Role::kUpdate);
  call.reduce_op = &opts.reduceOp;
  return dispatch(
      call, [&](Other& other, const CallDesc& with) { return other.allreduce_sparse(with.outputs.list(), opts); });
}

SageBackend::WorkPtr SageBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  CallDesc call("all_reduce_coalesced", Kind::kAllReduce, {"sagellm:all_reduce", OpType::ALLREDUCE_COALESCED}, opts);
  call.coalesced = true;
  call.outputs = Operand(tensors, Role::kUpdate);
  call.reduce_op = &opts.reduceOp;
  return dispatch(
      call, [&](Other& other, const CallDesc& with) { return other.allreduce_coalesced(with.outputs.list(), opts); });
}

SageBackend::WorkPtr SageBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  CallDesc call("reduce", Kind::kReduce, {"sagellm:reduce", OpType::REDUCE}, opts);
  call.root = opts.rootRank;
  call.root_tensor = opts.rootTensor;
  call.outputs = Operand(tensors, is_root(call) ? Role::kUpdate : Role::kRead);
  call.reduce_op = &opts.reduceOp;
  return dispatch(call, [&](Other& other, const CallDesc& with) { return other.reduce(with.outputs.list(), opts); });
}

SageBackend::WorkPtr SageBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  CallDesc call("all_gather", Kind::kAllGather, {"sagellm:all_gather", OpType::ALLGATHER}, opts);
  call.inputs = Operand(inputs, Role::kRead);
  call.outputs = Operand(outputs, Role::kWrite, Blocks::kPerRank);
  return dispatch(call, [&](Other& other, const CallDesc& with) {
    return other.allgather(with.outputs.lists(), with.inputs.list(), opts);
  });
}

SageBackend::WorkPtr SageBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::AllgatherOptions& opts) {
  CallDesc call("all_gather_into_tensor", Kind::kAllGather, {"sagellm:_all_gather_base", OpType::_ALLGATHER_BASE},
                opts);
  call.inputs = Operand(input, Role::kRead);
  call.outputs = Operand(output, Role::kWrite, Blocks::kEqual);
  return dispatch(call, [&](Other& other, const CallDesc& with) {
    return other._allgather_base(with.outputs.tensor(), with.inputs.tensor(), opts);
  });
}

SageBackend::WorkPtr SageBackend::allgather_coalesced(Lists& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
  CallDesc call("all_gather_coalesced", Kind::kAllGather, {"sagellm:all_gather_coalesced", OpType::ALLGATHER_COALESCED},
                opts);
  call.coalesced = true;
  call.inputs = Operand(inputs, Role::kRead);
  call.outputs = Operand(outputs, Role::kWrite, Blocks::kPerRank);
  return dispatch(call, [&](Other& other, const CallDesc& with) {
    return other.allgather_coalesced(with.outputs.lists(), with.inputs.list(), opts);
  });
}

SageBackend::WorkPtr SageBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const c10d::AllgatherOptions& opts) {
  CallDesc call("all_gather_into_tensor_coalesced", Kind::kAllGather,
                {"sagellm:all_gather_into_tensor_coalesced", kGatherCoalesced}, opts);
  call.coalesced = true;
  call.inputs = Operand(inputs, Role::kRead);
  call.outputs = Operand(outputs, Role::kWrite, Blocks::kEqual);
  return dispatch(call, [&](Other& other, const CallDesc& with) {
    return other.allgather_into_tensor_coalesced(with.outputs.list(), with.inputs.list(), opts);
  });
}

SageBackend::WorkPtr SageBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  CallDesc call("gather", Kind::kGather, {"sagellm:gather", OpType::GATHER}, opts);
  call.root = opts.rootRank;
  call.inputs = Operand(inputs, Role::kRead);
  call.outputs = Operand(outputs, Role::kWrite, Blocks::kPerRank);
  return dispatch(call, [&](Other& other, const CallDesc& with) {
    return other.gather(with.outputs.lists(), with.inputs.list(), opts);
  });
}

SageBackend::WorkPtr SageBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) {
  CallDesc call("scatter", Kind::kScatter, {"sagellm:scatter", OpType::SCATTER}, opts);
  call.root = opts.rootRank;
  call.inputs = Operand(inputs, Role::kRead, Blocks::kPerRank);
  call.outputs = Operand(outputs, Role::kWrite);
  return dispatch(call, [&](Other& other, const CallDesc& with) {
    return other.scatter(with.outputs.list(), with.inputs.lists(), opts);
  });
}

SageBackend::WorkPtr SageBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                                 const c10d::ReduceScatterOptions& opts) {
  CallDesc call("reduce_scatter", Kind::kReduceScatter, {"sagellm:reduce_scatter", OpType::REDUCE_SCATTER}, opts);
  call.inputs = Operand(inputs, Role::kRead, Blocks::kPerRank);
  call.outputs = Operand(outputs, Role::kWrite);
  call.reduce_op = &opts.reduceOp;
  return dispatch(call, [&](Other& other, const CallDesc& with) {
    return other.reduce_scatter(with.outputs.list(), with.inputs.lists(), opts);
  });
}

SageBackend::WorkPtr SageBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::ReduceScatterOptions& opts) {
  CallDesc call("reduce_scatter_tensor", Kind::kReduceScatter,
                {"sagellm:_reduce_scatter_base", OpType::_REDUCE_SCATTER_BASE}, opts);
  call.inputs = Operand(input, Role::kRead, Blocks::kEqual);
  call.outputs = Operand(output, Role::kWrite);
  call.reduce_op = &opts.reduceOp;
  return dispatch(call, [&](Other& other, const CallDesc& with) {
    return other._reduce_scatter_base(with.outputs.tensor(), with.inputs.tensor(), opts);
  });
}

SageBackend::WorkPtr SageBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const c10d::ReduceScatterOptions& opts) {
  CallDesc call("reduce_scatter_tensor_coalesced", Kind::kReduceScatter,
                {"sagellm:reduce_scatter_tensor_coalesced", kReduceScatterCoalesced}, opts);
  call.coalesced = true;
  call.inputs = Operand(inputs, Role::kRead, Blocks::kEqual);
  call.outputs = Operand(outputs, Role::kWrite);
  call.reduce_op = &opts.reduceOp;
  return dispatch(call, [&](Other& other, const CallDesc& with) {
    return other.reduce_scatter_tensor_coalesced(with.outputs.list(), with.inputs.list(), opts);
  });
}

SageBackend::WorkPtr SageBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                                const c10d::AllToAllOptions& opts) {
  CallDesc call("all_to_all_single", Kind::kAllToAll, {"sagellm:all_to_all", OpType::ALLTOALL_BASE}, opts);
  call.inputs = Operand(input, Role::kRead, Blocks::kSplits);
  call.outputs = Operand(output, Role::kWrite, Blocks::kSplits);
  call.input_splits = &input_splits;
  call.output_splits = &output_splits;
  return dispatch(call, [&](Other& other, const CallDesc& with) {
    return other.alltoall_base(with.outputs.tensor(), with.inputs.tensor(), output_splits, input_splits, opts);
  });
}

SageBackend::WorkPtr SageBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  CallDesc call("all_to_all", Kind::kAllToAll, {"sagellm:all_to_all", OpType::ALLTOALL}, opts);
  call.inputs = Operand(inputs, Role::kRead, Blocks::kPerRank);
  call.outputs = Operand(outputs, Role::kWrite, Blocks::kPerRank);
  return dispatch(call, [&](Other& other, const CallDesc& with) {
    return other.alltoall(with.outputs.list(), with.inputs.list(), opts);
  });
}

namespace {

// The accelerator that a barrier names, if this machine has it. Programs on the CPU pass ids, too (accelerate passes
// its local rank): torch then names a device of the kind it was built for, which need not exist.
std::optional<c10::Device> named_device(const c10d::BarrierOptions& opts) {
  std::optional<c10::Device> device = opts.device;
  if (!device && !opts.device_ids.empty()) {
    // torch's dispatcher hands on the ids and drops the device.
    if (const auto type = at::getAccelerator(false))
      device = c10::Device(*type, static_cast<c10::DeviceIndex>(opts.device_ids[0]));
  }
  if (!device || !is_accelerator(*device)) return std::nullopt;
  const auto found = c10::impl::VirtualGuardImpl(device->type()).deviceCount();
  return device->index() < found && found > 0 ? device : std::nullopt;
}

}  // namespace

SageBackend::WorkPtr SageBackend::barrier(const c10d::BarrierOptions& opts) {
  CallDesc call("barrier", Kind::kBarrier, {"sagellm:barrier", OpType::BARRIER}, opts);
  call.device = named_device(opts);
  if (!call.device) {
    // One that comes behind collectives through host memory is one of their device.
    if (const auto staged = staging_.collectives(); !staged.empty()) call.device = staged.back()->device;
  }
  const bool behind_all = !call.device;
  if (call.device) call.device = with_index(*call.device);
  WorkPtr work = dispatch(call, [&](Other& other, const CallDesc&) { return other.barrier(opts); });
  return behind_all ? behind_devices(std::move(work), opts.asyncOp) : work;
}

SageBackend::WorkPtr SageBackend::behind_devices(WorkPtr work, bool async) {
  if (region_.open()) return work;
  std::vector<std::shared_ptr<VendorDevices>> vendors;
  {
    const std::lock_guard<std::mutex> lock(vendor_mutex_);
    for (const auto& each : vendors_) {
      if (each.second) vendors.push_back(each.second);
    }
  }
  std::vector<WorkPtr> parts;
  for (const auto& each : vendors) {
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
  if (messages_delegated()) return delegate()->monitoredBarrier(opts, wait_all_ranks);
  CallbackPool::about_to_block();
  try {
    group_->monitored_barrier(opts.timeout.count(), wait_all_ranks);
  } catch (const rust::Error& error) {
    raise_coded(error.what());
  }
}

SageBackend::WorkPtr SageBackend::send(Tensors& tensors, int destination, int tag) {
  CallDesc call("send", Kind::kSend, {"sagellm:send", OpType::SEND}, c10d::kUnsetTimeout, true);
  call.outputs = Operand(tensors, Role::kRead);
  call.root = destination;
  call.tag = tag;
  return dispatch(
      call, [&](Other& other, const CallDesc& with) { return other.send(with.outputs.list(), destination, tag); });
}

SageBackend::WorkPtr SageBackend::recv(Tensors& tensors, int source, int tag) {
  CallDesc call("recv", Kind::kRecv, {"sagellm:recv", OpType::RECV}, c10d::kUnsetTimeout, true);
  call.outputs = Operand(tensors, Role::kWrite);
  call.root = source;
  call.tag = tag;
  return dispatch(call,
                  [&](Other& other, const CallDesc& with) { return other.recv(with.outputs.list(), source, tag); });
}

SageBackend::WorkPtr SageBackend::recvAnysource(Tensors& tensors, int tag) {
  CallDesc call("recv", Kind::kRecv, {"sagellm:recvAnySource", OpType::RECVANYSOURCE}, c10d::kUnsetTimeout, true);
  call.outputs = Operand(tensors, Role::kWrite);
  call.root = kAnyRank;
  call.tag = tag;
  return dispatch(call,
                  [&](Other& other, const CallDesc& with) { return other.recvAnysource(with.outputs.list(), tag); });
}

#ifdef SAGELLM_HAS_SINGLE_NAMES
SageBackend::WorkPtr SageBackend::all_gather_single(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& opts) {
  return _allgather_base(output, input, opts);
}

SageBackend::WorkPtr SageBackend::all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::AllgatherOptions& opts) {
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

SageBackend::WorkPtr SageBackend::reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                                        const c10d::ReduceScatterOptions& opts) {
  return _reduce_scatter_base(output, input, opts);
}

SageBackend::WorkPtr SageBackend::reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const c10d::ReduceScatterOptions& opts) {
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

SageBackend::WorkPtr SageBackend::all_to_all_single(at::Tensor& output, at::Tensor& input,
                                                    std::vector<int64_t>& output_splits,
                                                    std::vector<int64_t>& input_splits,
                                                    const c10d::AllToAllOptions& opts) {
  return alltoall_base(output, input, output_splits, input_splits, opts);
}

SageBackend::WorkPtr SageBackend::gather_single(at::Tensor& output, at::Tensor& input,
                                                const c10d::GatherOptions& opts) {
  return gather_into_tensor(output, input, opts);
}

SageBackend::WorkPtr SageBackend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                     const c10d::GatherOptions& opts) {
  CallDesc call("gather_into_tensor", Kind::kGather, {"sagellm:gather_single", OpType::GATHER}, opts);
  call.root = opts.rootRank;
  call.inputs = Operand(input, Role::kRead);
  // Elsewhere than at the root the output is a placeholder.
  if (is_root(call)) {
    call.outputs = Operand(output, Role::kWrite, Blocks::kEqual);
  }
  return dispatch(call, [&](Other& other, const CallDesc& with) {
    return other.gather_into_tensor(with.outputs.present() ? with.outputs.tensor() : output, with.inputs.tensor(),
                                    opts);
  });
}
#endif

}  // namespace sagellm
