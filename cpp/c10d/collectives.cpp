// The calls that move data: what each one requires, and which pieces of memory it is made of.
#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "c10d/backend.hpp"
#include "device/vendor.hpp"
#include "host/errors.hpp"
#include "host/sites.hpp"
#include "lower/checks.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

using c10d::OpType;

namespace {

// True where `part` lies exactly where block `rank` of the contiguous tensor `whole` lies: the in-place form of a
// gathering or scattering call, which the core allows.
bool is_block(const at::Tensor& part, const at::Tensor& whole, int rank) {
  return part.is_contiguous() && whole.is_contiguous() &&
         static_cast<const char*>(part.const_data_ptr()) ==
             static_cast<const char*>(whole.const_data_ptr()) + static_cast<size_t>(rank) * part.nbytes();
}

// Whether `part` must be staged because it overlaps `whole` elsewhere than in its own block.
bool collides(const at::Tensor& part, const at::Tensor& whole, int rank) {
  return overlap(part, whole) && !is_block(part, whole, rank);
}

bool collides(const at::Tensor& part, const std::vector<at::Tensor>& list, int rank) {
  for (size_t i = 0; i < list.size(); ++i) {
    const bool own = i == static_cast<size_t>(rank);
    if (own ? collides(part, list[i], 0) : overlap(part, list[i])) return true;
  }
  return false;
}

// `check::apart` for what the caller passed; not again when a call comes back with what stands for it.
void apart(const char* op, const std::vector<at::Tensor>& written, const std::vector<at::Tensor>& read = {}) {
  if (HostCall::current() == nullptr) check::apart(op, written, read);
}

constexpr const char* kOneBlockPerRank = "one block per rank";

size_t bytes_of(c10::ArrayRef<at::Tensor> tensors) {
  size_t bytes = 0;
  // Undefined and sparse ones have no bytes to ask for; the delegate judges them.
  for (const at::Tensor& tensor : tensors) bytes += tensor.defined() && !tensor.is_sparse() ? tensor.nbytes() : 0;
  return bytes;
}

size_t bytes_of(const std::vector<std::vector<at::Tensor>>& lists) {
  size_t bytes = 0;
  for (const auto& list : lists) bytes += bytes_of(list);
  return bytes;
}

// What the statistics are told of a delegate's call; `like` gives the element type.
Foreign foreign(Kind kind, c10::ArrayRef<at::Tensor> like, size_t read, size_t written) {
  Foreign call{};
  call.kind = kind;
  call.read = read;
  call.written = written;
  call.tensors = 1;
  call.element = !like.empty() && like[0].defined() ? static_cast<uint8_t>(like[0].scalar_type()) : kNoType;
  call.site = call_site();
  return call;
}

Foreign foreign_list(Kind kind, c10::ArrayRef<at::Tensor> list, size_t read, size_t written) {
  Foreign call = foreign(kind, list, read, written);
  call.tensors = static_cast<uint32_t>(list.size());
  return call;
}

Foreign foreign_rooted(Kind kind, c10::ArrayRef<at::Tensor> like, size_t read, size_t written, int64_t root,
                       int tag = 0) {
  Foreign call = foreign(kind, like, read, written);
  call.root = static_cast<uint32_t>(root);
  call.tag = static_cast<uint32_t>(tag);
  return call;
}

}  // namespace

SageBackend::WorkPtr SageBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  if (on_device(tensors)) {
    HostCall host(*this, "broadcast");
    Tensors copies = opts.rootRank == getRank() ? host.read(tensors) : host.write(tensors);
    return host.run([&] { return broadcast(copies, opts); });
  }
  if (delegated()) {
    return counted(foreign_rooted(Kind::kBroadcast, tensors, bytes_of(tensors), bytes_of(tensors), opts.rootRank),
                   [&](c10d::Backend& other) { return other.broadcast(tensors, opts); });
  }
  constexpr const char* kOp = "broadcast";
  const at::Tensor& tensor = check::only(kOp, "tensor", tensors);
  check::writable(kOp, "tensor", tensor);
  check::root(kOp, opts.rootRank, opts.rootTensor, getSize());
  Plan plan(kOp, Kind::kBroadcast, opts.timeout);
  plan.call.root = static_cast<uint32_t>(opts.rootRank);
  if (opts.rootRank == getRank()) {
    plan.read(tensor);
  } else {
    plan.write(tensor);
  }
  return submit(plan, {"sagellm:broadcast", OpType::BROADCAST}, tensors, tensors, opts.asyncOp);
}

SageBackend::WorkPtr SageBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (on_device(tensors)) {
    HostCall host(*this, "all_reduce");
    Tensors copies = host.update(tensors);
    return host.run([&] { return allreduce(copies, opts); });
  }
  if (delegated()) {
    return counted(foreign(Kind::kAllReduce, tensors, bytes_of(tensors), bytes_of(tensors)),
                   [&](c10d::Backend& other) { return other.allreduce(tensors, opts); });
  }
  constexpr const char* kOp = "all_reduce";
  const at::Tensor& tensor = check::only(kOp, "tensor", tensors);
  if (tensor.defined() && tensor.is_sparse()) {
    // It is made of messages.
    if (spans_hosts()) {
      return beside(counted(foreign(Kind::kAllReduce, tensors, 0, 0),
                            [&](c10d::Backend& other) { return other.allreduce(tensors, opts); }));
    }
    return beside(allreduce_coo(tensors[0], opts));
  }
  check::writable(kOp, "tensor", tensor);
  Plan plan(kOp, Kind::kAllReduce, opts.timeout);
  plan.combine(tensor, opts.reduceOp);
  plan.update(tensor);
  return submit(plan, {"sagellm:all_reduce", OpType::ALLREDUCE}, tensors, tensors, opts.asyncOp);
}

SageBackend::WorkPtr SageBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (delegated() && !on_device(tensors)) {
    return counted(foreign(Kind::kAllReduce, tensors, 0, 0),
                   [&](c10d::Backend& other) { return other.allreduce_sparse(tensors, opts); });
  }
  return allreduce(tensors, opts);
}

SageBackend::WorkPtr SageBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  apart("all_reduce_coalesced", tensors);
  if (on_device(tensors)) {
    HostCall host(*this, "all_reduce_coalesced");
    Tensors copies = host.update(tensors);
    return host.run([&] { return allreduce_coalesced(copies, opts); });
  }
  if (delegated()) {
    return counted(foreign_list(Kind::kAllReduce, tensors, bytes_of(tensors), bytes_of(tensors)),
                   [&](c10d::Backend& other) { return other.allreduce_coalesced(tensors, opts); });
  }
  constexpr const char* kOp = "all_reduce_coalesced";
  check::not_empty(kOp, tensors);
  check::writable(kOp, "tensor", tensors);
  std::vector<Plan> plans;
  std::optional<at::ScalarType> type;  // of the plan that takes in more tensors
  size_t open = 0;                     // its place
  for (const at::Tensor& tensor : tensors) {
    const bool alone = HostCall::by_vendor() && !device_packs(tensor.nbytes());
    if (alone || tensor.scalar_type() != type) {
      plans.emplace_back(kOp, Kind::kAllReduce, opts.timeout).combine(tensor, opts.reduceOp);
      plans.back().call.counts = plans.size() == 1;
      plans.back().call.tensors = 0;
      if (!alone) {
        type = tensor.scalar_type();
        open = plans.size() - 1;
      }
    }
    Plan& plan = alone ? plans.back() : plans[open];
    ++plan.call.tensors;
    plan.update(tensor);
  }
  return submit_all(plans, {"sagellm:all_reduce", OpType::ALLREDUCE_COALESCED}, tensors, tensors, opts.asyncOp);
}

SageBackend::WorkPtr SageBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  if (on_device(tensors)) {
    HostCall host(*this, "reduce");
    Tensors copies = opts.rootRank == getRank() ? host.update(tensors) : host.read(tensors);
    return host.run([&] { return reduce(copies, opts); });
  }
  if (delegated()) {
    return counted(foreign_rooted(Kind::kReduce, tensors, bytes_of(tensors), bytes_of(tensors), opts.rootRank),
                   [&](c10d::Backend& other) { return other.reduce(tensors, opts); });
  }
  constexpr const char* kOp = "reduce";
  const at::Tensor& tensor = check::only(kOp, "tensor", tensors);
  check::writable(kOp, "tensor", tensor);
  check::root(kOp, opts.rootRank, opts.rootTensor, getSize());
  Plan plan(kOp, Kind::kReduce, opts.timeout);
  plan.combine(tensor, opts.reduceOp);
  plan.call.root = static_cast<uint32_t>(opts.rootRank);
  if (opts.rootRank == getRank()) {
    plan.update(tensor);
  } else {
    plan.read(tensor);
  }
  return submit(plan, {"sagellm:reduce", OpType::REDUCE}, tensors, tensors, opts.asyncOp);
}

SageBackend::WorkPtr SageBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  if (on_device(inputs) || on_device(outputs)) {
    HostCall host(*this, "all_gather");
    Tensors read = host.read(inputs);
    Lists written = host.write(outputs);
    return host.run([&] { return allgather(written, read, opts); });
  }
  if (delegated()) {
    return counted(foreign(Kind::kAllGather, inputs, bytes_of(inputs), bytes_of(outputs)),
                   [&](c10d::Backend& other) { return other.allgather(outputs, inputs, opts); });
  }
  constexpr const char* kOp = "all_gather";
  const at::Tensor& input = check::only(kOp, "input tensor", inputs);
  const Tensors& output = check::only(kOp, "output list", outputs);
  check::dense_cpu(kOp, "input tensor", input);
  check::per_rank(kOp, "output list", output.size(), getSize());
  check::writable(kOp, "output tensor", output);
  check::same_dtype(kOp, input, output);
  check::elements(kOp, "this rank's output tensor", output[static_cast<size_t>(getRank())].numel(), input.numel(),
                  "as many as the input tensor");
  Plan plan(kOp, Kind::kAllGather, opts.timeout);
  plan.read(input, collides(input, output, getRank()));
  plan.write_all(output);
  plan.set_out_blocks(output);
  return submit(plan, {"sagellm:all_gather", OpType::ALLGATHER}, inputs, output, opts.asyncOp);
}

SageBackend::WorkPtr SageBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::AllgatherOptions& opts) {
  if (on_device(input) || on_device(output)) {
    HostCall host(*this, "all_gather_into_tensor");
    at::Tensor read = host.read(input);
    at::Tensor written = host.write(output);
    return host.run([&] { return _allgather_base(written, read, opts); });
  }
  if (delegated()) {
    return counted(foreign(Kind::kAllGather, input, bytes_of(input), bytes_of(output)),
                   [&](c10d::Backend& other) { return other._allgather_base(output, input, opts); });
  }
  constexpr const char* kOp = "all_gather_into_tensor";
  check::dense_cpu(kOp, "input tensor", input);
  check::writable(kOp, "output tensor", output);
  check::same_dtype(kOp, input, output);
  check::elements(kOp, "output tensor", output.numel(), input.numel() * getSize(), kOneBlockPerRank);
  Plan plan(kOp, Kind::kAllGather, opts.timeout);
  plan.read(input, collides(input, output, getRank()));
  plan.write(output);
  return submit(plan, {"sagellm:_all_gather_base", OpType::_ALLGATHER_BASE}, input, output, opts.asyncOp);
}

SageBackend::WorkPtr SageBackend::allgather_coalesced(Lists& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
  if (inputs.size() > 1) {
    Tensors results;
    for (const Tensors& list : outputs) results.insert(results.end(), list.begin(), list.end());
    apart("all_gather_coalesced", results);
    for (const Tensors& list : outputs) apart("all_gather_coalesced", list, inputs);
  }
  if (on_device(inputs) || on_device(outputs)) {
    HostCall host(*this, "all_gather_coalesced");
    Tensors read = host.read(inputs);
    Lists written = host.write(outputs);
    return host.run([&] { return allgather_coalesced(written, read, opts); });
  }
  if (delegated()) {
    return counted(foreign_list(Kind::kAllGather, inputs, bytes_of(inputs), bytes_of(outputs)),
                   [&](c10d::Backend& other) { return other.allgather_coalesced(outputs, inputs, opts); });
  }
  constexpr const char* kOp = "all_gather_coalesced";
  check::not_empty(kOp, inputs);
  check::dense_cpu(kOp, "input tensor", inputs);
  check::per_rank(kOp, "list of output lists", outputs.size(), getSize());
  Plan plan(kOp, Kind::kAllGather, opts.timeout);
  Tensors results;
  for (const Tensors& list : outputs) {
    check::same_length(kOp, "an output list", list.size(), "the input list", inputs.size());
    for (size_t i = 0; i < list.size(); ++i) {
      check::writable(kOp, "output tensor", list[i]);
      check::same_dtype(kOp, inputs[i], list[i]);
      check::elements(kOp, "output tensor", list[i].numel(), inputs[i].numel(), "as many as its input tensor");
      results.push_back(list[i]);
    }
  }
  for (const at::Tensor& input : inputs) {
    bool stage = false;
    for (const at::Tensor& result : results) stage = stage || overlap(input, result);
    plan.read(input, stage);
  }
  plan.write_all(results);
  plan.call.tensors = static_cast<uint32_t>(inputs.size());
  return submit(plan, {"sagellm:all_gather_coalesced", OpType::ALLGATHER_COALESCED}, inputs, results, opts.asyncOp);
}

SageBackend::WorkPtr SageBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const c10d::AllgatherOptions& opts) {
  apart("all_gather_into_tensor_coalesced", outputs, inputs);
  if (on_device(inputs) || on_device(outputs)) {
    HostCall host(*this, "all_gather_into_tensor_coalesced");
    Tensors read = host.read(inputs);
    Tensors written = host.write(outputs);
    return host.run([&] { return allgather_into_tensor_coalesced(written, read, opts); });
  }
  if (delegated()) {
    return counted(foreign_list(Kind::kAllGather, inputs, bytes_of(inputs), bytes_of(outputs)),
                   [&](c10d::Backend& other) { return other.allgather_into_tensor_coalesced(outputs, inputs, opts); });
  }
  constexpr const char* kOp = "all_gather_into_tensor_coalesced";
  check::not_empty(kOp, inputs);
  check::same_length(kOp, "the output list", outputs.size(), "the input list", inputs.size());
  check::dense_cpu(kOp, "input tensor", inputs);
  check::writable(kOp, "output tensor", outputs);
  Plan plan(kOp, Kind::kAllGather, opts.timeout);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check::same_dtype(kOp, inputs[i], outputs[i]);
    check::elements(kOp, "output tensor", outputs[i].numel(), inputs[i].numel() * getSize(), kOneBlockPerRank);
    plan.read(inputs[i], collides(inputs[i], outputs[i], getRank()));
  }
  plan.write_blocks(outputs, static_cast<size_t>(getSize()));
  plan.call.tensors = static_cast<uint32_t>(inputs.size());
  return submit(plan, {"sagellm:all_gather_into_tensor_coalesced", kGatherCoalesced}, inputs, outputs, opts.asyncOp);
}

SageBackend::WorkPtr SageBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  if (on_device(inputs) || on_device(outputs)) {
    HostCall host(*this, "gather");
    Tensors read = host.read(inputs);
    Lists written = host.write(outputs);
    return host.run([&] { return gather(written, read, opts); });
  }
  if (delegated()) {
    return counted(foreign_rooted(Kind::kGather, inputs, bytes_of(inputs), bytes_of(outputs), opts.rootRank),
                   [&](c10d::Backend& other) { return other.gather(outputs, inputs, opts); });
  }
  constexpr const char* kOp = "gather";
  const at::Tensor& input = check::only(kOp, "input tensor", inputs);
  check::dense_cpu(kOp, "input tensor", input);
  check::root(kOp, opts.rootRank, 0, getSize());
  Plan plan(kOp, Kind::kGather, opts.timeout);
  plan.call.root = static_cast<uint32_t>(opts.rootRank);
  const Label label{"sagellm:gather", OpType::GATHER};
  if (opts.rootRank != getRank()) {
    check::empty_elsewhere(kOp, "output list", outputs, opts.rootRank, getRank());
    plan.read(input);
    return submit(plan, label, inputs, TensorView(), opts.asyncOp);
  }
  const Tensors& output = check::only(kOp, "output list", outputs);
  check::per_rank(kOp, "output list", output.size(), getSize());
  check::writable(kOp, "output tensor", output);
  check::same_dtype(kOp, input, output);
  for (const at::Tensor& tensor : output) {
    check::elements(kOp, "output tensor", tensor.numel(), input.numel(), "as many as the input tensor");
  }
  plan.read(input, collides(input, output, getRank()));
  plan.write_all(output);
  return submit(plan, label, inputs, output, opts.asyncOp);
}

SageBackend::WorkPtr SageBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) {
  if (on_device(inputs) || on_device(outputs)) {
    HostCall host(*this, "scatter");
    Lists read = host.read(inputs);
    Tensors written = host.write(outputs);
    return host.run([&] { return scatter(written, read, opts); });
  }
  if (delegated()) {
    return counted(foreign_rooted(Kind::kScatter, outputs, bytes_of(inputs), bytes_of(outputs), opts.rootRank),
                   [&](c10d::Backend& other) { return other.scatter(outputs, inputs, opts); });
  }
  constexpr const char* kOp = "scatter";
  const at::Tensor& output = check::only(kOp, "output tensor", outputs);
  check::writable(kOp, "output tensor", output);
  check::root(kOp, opts.rootRank, 0, getSize());
  Plan plan(kOp, Kind::kScatter, opts.timeout);
  plan.call.root = static_cast<uint32_t>(opts.rootRank);
  const Label label{"sagellm:scatter", OpType::SCATTER};
  if (opts.rootRank != getRank()) {
    check::empty_elsewhere(kOp, "input list", inputs, opts.rootRank, getRank());
    plan.write(output);
    return submit(plan, label, TensorView(), outputs, opts.asyncOp);
  }
  const Tensors& input = check::only(kOp, "input list", inputs);
  check::per_rank(kOp, "input list", input.size(), getSize());
  check::dense_cpu(kOp, "input tensor", input);
  check::same_dtype(kOp, output, input);
  for (const at::Tensor& tensor : input) {
    check::elements(kOp, "input tensor", tensor.numel(), output.numel(), "as many as the output tensor");
    plan.read(tensor);
  }
  plan.write(output, collides(output, input, getRank()));
  return submit(plan, label, input, outputs, opts.asyncOp);
}

SageBackend::WorkPtr SageBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                                 const c10d::ReduceScatterOptions& opts) {
  if (on_device(inputs) || on_device(outputs)) {
    HostCall host(*this, "reduce_scatter");
    Lists read = host.read(inputs);
    Tensors written = host.write(outputs);
    return host.run([&] { return reduce_scatter(written, read, opts); });
  }
  if (delegated()) {
    return counted(foreign(Kind::kReduceScatter, outputs, bytes_of(inputs), bytes_of(outputs)),
                   [&](c10d::Backend& other) { return other.reduce_scatter(outputs, inputs, opts); });
  }
  constexpr const char* kOp = "reduce_scatter";
  const at::Tensor& output = check::only(kOp, "output tensor", outputs);
  const Tensors& input = check::only(kOp, "input list", inputs);
  check::writable(kOp, "output tensor", output);
  check::per_rank(kOp, "input list", input.size(), getSize());
  check::dense_cpu(kOp, "input tensor", input);
  check::same_dtype(kOp, output, input);
  check::elements(kOp, "output tensor", output.numel(), input[static_cast<size_t>(getRank())].numel(),
                  "as many as this rank's input tensor");
  Plan plan(kOp, Kind::kReduceScatter, opts.timeout);
  plan.combine(output, opts.reduceOp);
  for (const at::Tensor& tensor : input) plan.read(tensor);
  plan.write(output, collides(output, input, getRank()));
  plan.set_in_blocks(input);
  return submit(plan, {"sagellm:reduce_scatter", OpType::REDUCE_SCATTER}, input, outputs, opts.asyncOp);
}

SageBackend::WorkPtr SageBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::ReduceScatterOptions& opts) {
  if (on_device(input) || on_device(output)) {
    HostCall host(*this, "reduce_scatter_tensor");
    at::Tensor read = host.read(input);
    at::Tensor written = host.write(output);
    return host.run([&] { return _reduce_scatter_base(written, read, opts); });
  }
  if (delegated()) {
    return counted(foreign(Kind::kReduceScatter, output, bytes_of(input), bytes_of(output)),
                   [&](c10d::Backend& other) { return other._reduce_scatter_base(output, input, opts); });
  }
  constexpr const char* kOp = "reduce_scatter_tensor";
  check::writable(kOp, "output tensor", output);
  check::dense_cpu(kOp, "input tensor", input);
  check::same_dtype(kOp, output, input);
  check::elements(kOp, "input tensor", input.numel(), output.numel() * getSize(), kOneBlockPerRank);
  Plan plan(kOp, Kind::kReduceScatter, opts.timeout);
  plan.combine(output, opts.reduceOp);
  plan.read(input);
  plan.write(output, collides(output, input, getRank()));
  return submit(plan, {"sagellm:_reduce_scatter_base", OpType::_REDUCE_SCATTER_BASE}, input, output, opts.asyncOp);
}

SageBackend::WorkPtr SageBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const c10d::ReduceScatterOptions& opts) {
  apart("reduce_scatter_tensor_coalesced", outputs, inputs);
  if (on_device(inputs) || on_device(outputs)) {
    HostCall host(*this, "reduce_scatter_tensor_coalesced");
    Tensors read = host.read(inputs);
    Tensors written = host.write(outputs);
    return host.run([&] { return reduce_scatter_tensor_coalesced(written, read, opts); });
  }
  if (delegated()) {
    return counted(foreign_list(Kind::kReduceScatter, outputs, bytes_of(inputs), bytes_of(outputs)),
                   [&](c10d::Backend& other) { return other.reduce_scatter_tensor_coalesced(outputs, inputs, opts); });
  }
  constexpr const char* kOp = "reduce_scatter_tensor_coalesced";
  check::not_empty(kOp, inputs);
  check::same_length(kOp, "the output list", outputs.size(), "the input list", inputs.size());
  check::writable(kOp, "output tensor", outputs);
  check::dense_cpu(kOp, "input tensor", inputs);
  std::vector<Plan> plans;
  size_t first = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check::same_dtype(kOp, inputs[i], outputs[i]);
    check::elements(kOp, "input tensor", inputs[i].numel(), outputs[i].numel() * getSize(), kOneBlockPerRank);
    if (i == first) plans.emplace_back(kOp, Kind::kReduceScatter, opts.timeout).combine(inputs[i], opts.reduceOp);
    plans.back().write(outputs[i], collides(outputs[i], inputs[i], getRank()));
    if (i + 1 == inputs.size() || inputs[i + 1].scalar_type() != inputs[i].scalar_type()) {
      plans.back().call.counts = first == 0;
      plans.back().call.tensors = static_cast<uint32_t>(i + 1 - first);
      plans.back().read_blocks(TensorView(inputs).slice(first, i + 1 - first), static_cast<size_t>(getSize()));
      first = i + 1;
    }
  }
  return submit_all(plans, {"sagellm:reduce_scatter_tensor_coalesced", kReduceScatterCoalesced}, inputs, outputs,
                    opts.asyncOp);
}

SageBackend::WorkPtr SageBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                                const c10d::AllToAllOptions& opts) {
  if (on_device(input) || on_device(output)) {
    HostCall host(*this, "all_to_all_single");
    at::Tensor read = host.read(input);
    at::Tensor written = host.write(output);
    return host.run([&] { return alltoall_base(written, read, output_splits, input_splits, opts); });
  }
  if (delegated()) {
    return counted(foreign(Kind::kAllToAll, input, bytes_of(input), bytes_of(output)), [&](c10d::Backend& other) {
      return other.alltoall_base(output, input, output_splits, input_splits, opts);
    });
  }
  constexpr const char* kOp = "all_to_all_single";
  check::writable(kOp, "output tensor", output);
  check::dense_cpu(kOp, "input tensor", input);
  check::same_dtype(kOp, input, output);
  Plan plan(kOp, Kind::kAllToAll, opts.timeout);
  // Given even where all blocks are equal: another rank's may not be.
  plan.out_blocks = check::splits(kOp, "output", output, output_splits, getSize());
  plan.in_blocks = check::splits(kOp, "input", input, input_splits, getSize());
  if (output_splits.empty() && input_splits.empty()) {
    check::elements(kOp, "output tensor", output.numel(), input.numel(), "as many as the input tensor");
  }
  plan.read(input, overlap(input, output));
  plan.write(output);
  return submit(plan, {"sagellm:all_to_all", OpType::ALLTOALL_BASE}, input, output, opts.asyncOp);
}

SageBackend::WorkPtr SageBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  if (on_device(inputs) || on_device(outputs)) {
    HostCall host(*this, "all_to_all");
    Tensors read = host.read(inputs);
    Tensors written = host.write(outputs);
    return host.run([&] { return alltoall(written, read, opts); });
  }
  if (delegated()) {
    return counted(foreign(Kind::kAllToAll, inputs, bytes_of(inputs), bytes_of(outputs)),
                   [&](c10d::Backend& other) { return other.alltoall(outputs, inputs, opts); });
  }
  constexpr const char* kOp = "all_to_all";
  check::per_rank(kOp, "output list", outputs.size(), getSize());
  check::per_rank(kOp, "input list", inputs.size(), getSize());
  check::writable(kOp, "output tensor", outputs);
  check::dense_cpu(kOp, "input tensor", inputs);
  check::same_dtype(kOp, inputs[0], inputs);
  check::same_dtype(kOp, inputs[0], outputs);
  const auto own = static_cast<size_t>(getRank());
  check::elements(kOp, "this rank's output tensor", outputs[own].numel(), inputs[own].numel(),
                  "as many as its input tensor");
  Plan plan(kOp, Kind::kAllToAll, opts.timeout);
  for (const at::Tensor& input : inputs) {
    plan.in_blocks.push_back(input.nbytes());
    bool stage = false;
    for (const at::Tensor& output : outputs) stage = stage || overlap(input, output);
    plan.read(input, stage);
  }
  for (const at::Tensor& output : outputs) plan.out_blocks.push_back(output.nbytes());
  plan.write_all(outputs);
  return submit(plan, {"sagellm:all_to_all", OpType::ALLTOALL}, inputs, outputs, opts.asyncOp);
}

namespace {

// The accelerator that a barrier names, if this machine has it. Programs on the CPU pass ids, too (accelerate passes
// its local rank): torch then names a device of the kind it was built for, which need not exist.
std::optional<c10::Device> device_of(const c10d::BarrierOptions& opts) {
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
  std::optional<c10::Device> device = device_of(opts);
  if (!device) {
    // One that comes behind collectives through host memory is one of their device.
    if (const auto staged = staging_.collectives(); !staged.empty()) device = staged.back()->device;
  }
  if (!device) return behind_devices(barrier_of_hosts(opts), opts.asyncOp);
  HostCall host(*this, "barrier", with_index(*device));
  return host.run([&] { return barrier_of_hosts(opts); });
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
  return c10::make_intrusive<JoinedWork>(getRank(), std::move(parts));
}

SageBackend::WorkPtr SageBackend::barrier_of_hosts(const c10d::BarrierOptions& opts) {
  if (delegated()) {
    return counted(foreign(Kind::kBarrier, TensorView(), 0, 0),
                   [&](c10d::Backend& other) { return other.barrier(opts); });
  }
  if (std::vector<WorkPtr> earlier = pending_beside(); !earlier.empty())
    return barrier_behind(std::move(earlier), opts);
  Plan plan("barrier", Kind::kBarrier, opts.timeout);
  return submit(plan, {"sagellm:barrier", OpType::BARRIER}, TensorView(), TensorView(), opts.asyncOp);
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
  if (on_device(tensors)) {
    HostCall host(*this, "send");
    Tensors copies = host.read(tensors);
    return host.run([&] { return send(copies, destination, tag); });
  }
  if (messages_delegated()) {
    return delegate_message(foreign_rooted(Kind::kSend, tensors, bytes_of(tensors), 0, destination, tag), tensors,
                            [&](c10d::Backend& other) { return other.send(tensors, destination, tag); });
  }
  constexpr const char* kOp = "send";
  const at::Tensor& tensor = check::only(kOp, "tensor", tensors);
  check::dense_cpu(kOp, "tensor", tensor);
  check::peer(kOp, destination, getRank(), getSize(), sends_to_itself());
  check::tag(kOp, tag);
  Plan plan(kOp, Kind::kSend, c10d::kUnsetTimeout);
  plan.call.root = static_cast<uint32_t>(destination);
  plan.call.tag = static_cast<uint32_t>(tag);
  plan.read(tensor);
  return submit(plan, {"sagellm:send", OpType::SEND}, tensors, tensors, true);
}

SageBackend::WorkPtr SageBackend::receive(Tensors& tensors, uint32_t source, int tag, const Label& label,
                                          const char* op) {
  const at::Tensor& tensor = check::only(op, "tensor", tensors);
  check::writable(op, "tensor", tensor);
  check::tag(op, tag);
  Plan plan(op, Kind::kRecv, c10d::kUnsetTimeout);
  plan.call.root = source;
  plan.call.tag = static_cast<uint32_t>(tag);
  plan.write(tensor);
  return submit(plan, label, tensors, tensors, true);
}

SageBackend::WorkPtr SageBackend::recv(Tensors& tensors, int source, int tag) {
  if (on_device(tensors)) {
    HostCall host(*this, "recv");
    Tensors copies = host.write(tensors);
    return host.run([&] { return recv(copies, source, tag); });
  }
  if (messages_delegated()) {
    return delegate_message(foreign_rooted(Kind::kRecv, tensors, 0, bytes_of(tensors), source, tag), tensors,
                            [&](c10d::Backend& other) { return other.recv(tensors, source, tag); });
  }
  check::peer("recv", source, getRank(), getSize(), sends_to_itself());
  return receive(tensors, static_cast<uint32_t>(source), tag, {"sagellm:recv", OpType::RECV}, "recv");
}

SageBackend::WorkPtr SageBackend::recvAnysource(Tensors& tensors, int tag) {
  if (on_device(tensors)) {
    HostCall host(*this, "recv");
    Tensors copies = host.write(tensors);
    return host.run([&] { return recvAnysource(copies, tag); });
  }
  if (messages_delegated()) {
    return delegate_message(foreign_rooted(Kind::kRecv, tensors, 0, bytes_of(tensors), kAnyRank, tag), tensors,
                            [&](c10d::Backend& other) { return other.recvAnysource(tensors, tag); });
  }
  return receive(tensors, kAnyRank, tag, {"sagellm:recvAnySource", OpType::RECVANYSOURCE}, "recv");
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
  if (on_device(input)) {
    HostCall host(*this, "gather_into_tensor");
    at::Tensor read = host.read(input);
    // Elsewhere than at the root the output is a placeholder.
    at::Tensor written = opts.rootRank == getRank() ? host.write(output) : output;
    return host.run([&] { return gather_into_tensor(written, read, opts); });
  }
  if (delegated()) {
    return counted(foreign_rooted(Kind::kGather, input, bytes_of(input),
                                  getRank() == opts.rootRank ? bytes_of(output) : 0, opts.rootRank),
                   [&](c10d::Backend& other) { return other.gather_into_tensor(output, input, opts); });
  }
  constexpr const char* kOp = "gather_into_tensor";
  check::dense_cpu(kOp, "input tensor", input);
  check::root(kOp, opts.rootRank, 0, getSize());
  Plan plan(kOp, Kind::kGather, opts.timeout);
  plan.call.root = static_cast<uint32_t>(opts.rootRank);
  const Label label{"sagellm:gather_single", OpType::GATHER};
  // Elsewhere than at the root the output is a placeholder.
  if (opts.rootRank != getRank()) {
    plan.read(input);
    return submit(plan, label, input, TensorView(), opts.asyncOp);
  }
  check::writable(kOp, "output tensor", output);
  check::same_dtype(kOp, input, output);
  check::elements(kOp, "output tensor", output.numel(), input.numel() * getSize(), kOneBlockPerRank);
  plan.read(input, collides(input, output, getRank()));
  plan.write(output);
  return submit(plan, label, input, output, opts.asyncOp);
}
#endif

}  // namespace sagellm
