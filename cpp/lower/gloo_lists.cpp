#include "lower/gloo_lists.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "host/errors.hpp"
#include "lower/checks.hpp"
#include "lower/combined.hpp"

namespace sagellm {

namespace {

using Tensors = Operand::Tensors;
using Op = c10d::ReduceOp;

// Makes the plan copy `from` into `to` once the operation's results are in `from`.
void copy_back(Plan& plan, const at::Tensor& from, const at::Tensor& to) {
  if (to.numel() == 0) return;
  plan.after.push_back({from, to});
  plan.touch(to, true);
  plan.call.staged = true;
}

void all_reduce(Plan& plan, const CallDesc& call) {
  const Tensors& tensors = call.outputs.list();
  const Op::RedOpType op = call.reduce_op->op_;
  const at::Tensor sum(at::detail::empty_cpu(tensors[0].sizes(), tensors[0].scalar_type()));
  plan.combine(tensors[0], *call.reduce_op);
  plan.update(sum);
  // The lambda captures raw pointers, because a thread of the core must not drop the last reference to a tensor.
  // `plan.after` keeps the tensors.
  std::vector<at::TensorImpl*> own;
  for (const at::Tensor& tensor : tensors) own.push_back(tensor.unsafeGetTensorImpl());
  // Fills `sum` when the operation begins, not now: an earlier operation may still write the tensors.
  plan.prepare = [own, sum, op] {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto on_cpu = [](at::TensorImpl* it) {
      return at::Tensor(c10::intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(it)).cpu();
    };
    at::Tensor all = on_cpu(own[0]);
    for (size_t i = 1; i < own.size(); ++i) all = combined(all, on_cpu(own[i]), op);
    sum.copy_(all);
  };
  for (const at::Tensor& each : tensors) copy_back(plan, sum, each);
}

void broadcast(Plan& plan, const CallDesc& call) {
  const Tensors& tensors = call.outputs.list();
  const auto first = static_cast<size_t>(call.root_tensor);
  plan.add(tensors[first], call.outputs.role);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i != first) copy_back(plan, tensors[first], tensors[i]);
  }
}

void all_gather(Plan& plan, const CallDesc& call) {
  const Tensors& inputs = call.inputs.list();
  const Operand::Lists& lists = call.outputs.lists();
  plan.call.note.tensors = static_cast<uint32_t>(inputs.size());
  plan.note_list(inputs);
  const Tensors written = call.outputs.flat();
  for (const at::Tensor& input : inputs) {
    const bool aside =
        std::any_of(written.begin(), written.end(), [&](const at::Tensor& output) { return overlap(input, output); });
    plan.read(input, aside);
  }
  plan.write_all(lists[0]);
  for (size_t list = 1; list < lists.size(); ++list) {
    for (size_t i = 0; i < lists[list].size(); ++i) copy_back(plan, lists[0][i], lists[list][i]);
  }
}

}  // namespace

bool is_gloo_list(const CallDesc& call) {
  if (call.coalesced) return false;
  if (call.kind == Kind::kAllReduce || call.kind == Kind::kBroadcast) {
    return call.outputs.is_list() && call.outputs.list().size() > 1;
  }
  return call.kind == Kind::kAllGather && call.inputs.is_list() && call.inputs.list().size() > 1;
}

void lower_gloo_list(Plan& plan, const CallDesc& call, const Carrier& carrier) {
  check::gloo_list(call, carrier);
  switch (call.kind) {
    case Kind::kAllReduce:
      return all_reduce(plan, call);
    case Kind::kBroadcast:
      return broadcast(plan, call);
    default:
      return all_gather(plan, call);
  }
}

}  // namespace sagellm
