#include "lower/call.hpp"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <utility>

#include "host/errors.hpp"
#include "lower/checks.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

namespace {

using View = c10::ArrayRef<at::Tensor>;

constexpr const char* kOneBlockPerRank = "one block per rank";

// True where `part` lies exactly where block `rank` of the contiguous tensor `whole` lies: the in-place form of a
// gathering or scattering call, which the core allows.
bool is_block(const at::Tensor& part, const at::Tensor& whole, int rank) {
  return part.is_contiguous() && whole.is_contiguous() &&
         static_cast<const char*>(part.const_data_ptr()) ==
             static_cast<const char*>(whole.const_data_ptr()) + static_cast<size_t>(rank) * part.nbytes();
}

// Whether `part` needs a temporary because it overlaps `whole` elsewhere than in its own block.
bool collides(const at::Tensor& part, const at::Tensor& whole, int rank) {
  return overlap(part, whole) && !is_block(part, whole, rank);
}

// The same where the blocks of the ranks are a list.
bool collides(const at::Tensor& part, View blocks, int rank) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    const bool own = i == static_cast<size_t>(rank);
    if (own ? collides(part, blocks[i], 0) : overlap(part, blocks[i])) return true;
  }
  return false;
}

bool overlaps_any(const at::Tensor& tensor, View others) {
  return std::any_of(others.begin(), others.end(), [&](const at::Tensor& other) { return overlap(tensor, other); });
}

// ------------------------------------------------------------------------------------------------ checks

// The lengths of an argument's lists, and each of its tensors by itself.
void check_argument(const CallDesc& call, const Operand& operand, const Carrier& carrier) {
  const bool input = &operand == &call.inputs;
  const char* const name = call.has_one_argument() ? "tensor" : input ? "input tensor" : "output tensor";
  const char* const list = input ? "input list" : "output list";
  if (call.coalesced) {
    if (operand.is_lists()) check::per_rank(call.op, "list of output lists", operand.parts(), carrier.size);
  } else if (operand.is_lists()) {
    // Of a gathering or scattering call only the root has all blocks.
    const bool rooted = call.kind == Kind::kGather || call.kind == Kind::kScatter;
    if (rooted && call.root != carrier.rank) {
      return check::empty_elsewhere(call.op, list, operand.lists(), call.root, carrier.rank);
    }
    check::per_rank(call.op, list, check::only(call.op, list, operand.lists()).size(), carrier.size);
  } else if (operand.is_list()) {
    if (operand.blocks == Blocks::kPerRank) {
      check::per_rank(call.op, list, operand.list().size(), carrier.size);
    } else {
      check::only(call.op, name, operand.list());
    }
  }
  // The tensor of a broadcast or a reduce is written on some rank, and on the CPU all ranks judge it alike.
  const bool in_place = carrier.device.is_cpu() && (call.kind == Kind::kBroadcast || call.kind == Kind::kReduce);
  const bool written = operand.role != Role::kRead || in_place;
  operand.for_each([&](const at::Tensor& tensor) {
    if (written) {
      check::writable(call.op, name, tensor, carrier.device);
    } else {
      check::dense(call.op, name, tensor, carrier.device);
    }
  });
}

// How many elements the blocks of the ranks, `in` or `out`, have beside this rank's own.
void check_blocks(const CallDesc& call, View in, View out, const Carrier& carrier) {
  const char* const op = call.op;
  const auto own = static_cast<size_t>(carrier.rank);
  const auto each = [&](const char* what, View blocks, int64_t expected, const char* because) {
    for (const at::Tensor& block : blocks) check::elements(op, what, block.numel(), expected, because);
  };
  switch (call.kind) {
    case Kind::kAllGather:
      return check::elements(op, "this rank's output tensor", out[own].numel(), in[0].numel(),
                             "as many as the input tensor");
    case Kind::kGather:
      return each("output tensor", out, in[0].numel(), "as many as the input tensor");
    case Kind::kScatter:
      return each("input tensor", in, out[0].numel(), "as many as the output tensor");
    case Kind::kReduceScatter:
      return check::elements(op, "output tensor", out[0].numel(), in[own].numel(),
                             "as many as this rank's input tensor");
    case Kind::kAllToAll:
      return check::elements(op, "this rank's output tensor", out[own].numel(), in[own].numel(),
                             "as many as its input tensor");
    default:
      return;
  }
}

// Types and sizes of the inputs against those of the outputs, in a call or in one of a list.
void check_pair(const CallDesc& call, View in, View out, const Carrier& carrier) {
  if (in.empty() || out.empty()) return;
  const bool scatters = call.outputs.blocks == Blocks::kOwn;
  const at::Tensor& own = scatters ? out[0] : in[0];
  for (const View tensors : {in, out}) {
    for (const at::Tensor& tensor : tensors) check::same_dtype(call.op, own, tensor);
  }
  const Operand& blocks = scatters ? call.inputs : call.outputs;
  if (blocks.blocks == Blocks::kEqual) {
    check::elements(call.op, scatters ? "input tensor" : "output tensor", (scatters ? in : out)[0].numel(),
                    own.numel() * carrier.size, kOneBlockPerRank);
  } else if (blocks.blocks == Blocks::kPerRank) {
    check_blocks(call, in, out, carrier);
  }
}

void check_lists(const CallDesc& call, const Carrier& carrier) {
  const Operand& outputs = call.outputs;
  const Operand& first = call.has_one_argument() ? outputs : call.inputs;
  check::not_empty(call.op, first.list());
  if (outputs.is_list())
    check::same_length(call.op, "the output list", outputs.list().size(), "the input list", first.list().size());
  check_argument(call, call.inputs, carrier);
  check_argument(call, outputs, carrier);
  if (call.has_one_argument()) return;
  for (size_t part = 0; part < outputs.parts(); ++part) {
    const View out = outputs.part(part);
    if (outputs.is_lists())
      check::same_length(call.op, "an output list", out.size(), "the input list", first.list().size());
    for (size_t i = 0; i < out.size(); ++i) {
      const at::Tensor& in = call.inputs.list()[i];
      if (outputs.is_list()) {
        check_pair(call, in, out[i], carrier);
        continue;
      }
      check::same_dtype(call.op, in, out[i]);
      check::elements(call.op, "output tensor", out[i].numel(), in.numel(), "as many as its input tensor");
    }
  }
}

void check_call(const CallDesc& call, const Carrier& carrier) {
  if (call.coalesced) return check_lists(call, carrier);
  // First, because it decides who may pass a list.
  if (call.has_root()) check::root(call.op, call.root, call.root_tensor, carrier.size);
  check_argument(call, call.inputs, carrier);
  check_argument(call, call.outputs, carrier);
  if (call.is_message()) {
    if (call.root != kAnyRank) check::peer(call.op, call.root, carrier.rank, carrier.size, carrier.to_itself);
    check::tag(call.op, call.tag);
  }
  check_pair(call, call.inputs.first(), call.outputs.first(), carrier);
}

// ------------------------------------------------------------------------------------------------ pieces

Plan& add_plan(Plans& plans, const CallDesc& call, const Carrier& carrier) {
  plans.emplace_back(call.op, call.kind, call.timeout, carrier.vendor);
  Plan& plan = plans.back();
  plan.call.root = static_cast<uint32_t>(call.root);
  plan.call.tag = static_cast<uint32_t>(call.tag);
  return plan;
}

void add_inputs(Plan& plan, const CallDesc& call, const Carrier& carrier) {
  const Operand& inputs = call.inputs;
  const Operand& outputs = call.outputs;
  const bool several = call.coalesced && outputs.is_lists();
  const Operand::Tensors all = several ? outputs.flat() : Operand::Tensors();
  const View in = inputs.first();
  for (size_t i = 0; i < in.size(); ++i) {
    bool aside = false;
    if (call.kind == Kind::kAllToAll || several) {
      aside = overlaps_any(in[i], several ? View(all) : outputs.first());
    } else if (inputs.blocks == Blocks::kOwn) {
      aside = outputs.blocks == Blocks::kPerRank ? collides(in[i], outputs.first(), carrier.rank)
              : outputs.present()                ? collides(in[i], outputs.first()[i], carrier.rank)
                                                 : false;
    }
    plan.read(in[i], aside);
  }
}

void add_outputs(Plan& plan, const CallDesc& call, const Carrier& carrier) {
  const Operand& outputs = call.outputs;
  if (call.coalesced && outputs.is_lists()) return plan.write_all(outputs.flat());
  const View out = outputs.first();
  if (outputs.blocks == Blocks::kPerRank) return plan.write_all(out);
  if (call.coalesced) return plan.write_blocks(out, static_cast<size_t>(carrier.size));
  for (const at::Tensor& tensor : out) {
    // The block of a scattering call, beside those it is made of.
    const View in = call.inputs.first();
    const bool aside = outputs.blocks == Blocks::kOwn && !in.empty() &&
                       (call.inputs.blocks == Blocks::kPerRank ? collides(tensor, in, carrier.rank)
                                                               : collides(tensor, in[0], carrier.rank));
    plan.write(tensor, aside);
  }
}

// Sizes of the ranks' blocks where they may differ.
void add_block_sizes(Plan& plan, const CallDesc& call, const Carrier& carrier) {
  if (call.kind == Kind::kAllToAll) {
    // Given even where all are equal: another rank's may not be.
    if (call.inputs.blocks == Blocks::kSplits) {
      const at::Tensor& out = call.outputs.tensor();
      const at::Tensor& in = call.inputs.tensor();
      plan.out_blocks = check::splits(call.op, "output", out, *call.output_splits, carrier.size);
      plan.in_blocks = check::splits(call.op, "input", in, *call.input_splits, carrier.size);
      if (call.output_splits->empty() && call.input_splits->empty()) {
        check::elements(call.op, "output tensor", out.numel(), in.numel(), "as many as the input tensor");
      }
      return;
    }
    for (const at::Tensor& input : call.inputs.list()) plan.in_blocks.push_back(input.nbytes());
    for (const at::Tensor& output : call.outputs.list()) plan.out_blocks.push_back(output.nbytes());
  } else if (!call.coalesced) {
    if (call.inputs.blocks == Blocks::kPerRank) plan.set_in_blocks(call.inputs.first());
    if (call.outputs.blocks == Blocks::kPerRank) plan.set_out_blocks(call.outputs.first());
  }
}

void add_tensor(Plan& plan, const at::Tensor& tensor, Role role) {
  switch (role) {
    case Role::kRead:
      return plan.read(tensor);
    case Role::kWrite:
      return plan.write(tensor);
    case Role::kUpdate:
      return plan.update(tensor);
  }
}

// A list whose tensors are combined: one operation has numbers of one type. Which of them travel together is the
// core's to say; `kPackBytes` is its answer for a vendor's library.
Plans combined_lists(const CallDesc& call, const Carrier& carrier) {
  Plans plans;
  const auto next = [&](const at::Tensor& like) {
    Plan& plan = add_plan(plans, call, carrier);
    plan.combine(like, *call.reduce_op);
    plan.call.counts = plans.size() == 1;
    plan.call.tensors = 0;
  };
  if (call.kind == Kind::kAllReduce) {
    std::optional<at::ScalarType> type;  // of the plan that takes in more tensors
    size_t open = 0;                     // its place
    for (const at::Tensor& tensor : call.outputs.list()) {
      const bool alone = carrier.vendor && tensor.nbytes() > static_cast<size_t>(DeviceLimit::kPackBytes);
      if (alone || tensor.scalar_type() != type) {
        next(tensor);
        if (!alone) {
          type = tensor.scalar_type();
          open = plans.size() - 1;
        }
      }
      Plan& plan = alone ? plans.back() : plans[open];
      ++plan.call.tensors;
      plan.update(tensor);
    }
    return plans;
  }
  const Operand::Tensors& inputs = call.inputs.list();
  const Operand::Tensors& outputs = call.outputs.list();
  size_t first = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (i == first) next(inputs[i]);
    plans.back().write(outputs[i], collides(outputs[i], inputs[i], carrier.rank));
    if (i + 1 < inputs.size() && inputs[i + 1].scalar_type() == inputs[i].scalar_type()) continue;
    plans.back().call.tensors = static_cast<uint32_t>(i + 1 - first);
    plans.back().read_blocks(View(inputs).slice(first, i + 1 - first), static_cast<size_t>(carrier.size));
    first = i + 1;
  }
  return plans;
}

}  // namespace

Plans lower(const CallDesc& call, const Carrier& carrier) {
  check_call(call, carrier);
  if (call.coalesced && call.reduce_op != nullptr) return combined_lists(call, carrier);
  Plans plans;
  Plan& plan = add_plan(plans, call, carrier);
  if (call.reduce_op != nullptr) plan.combine(call.outputs.first()[0], *call.reduce_op);
  if (call.coalesced) plan.call.tensors = static_cast<uint32_t>(call.inputs.list().size());
  if (call.has_one_argument()) {
    for (const at::Tensor& tensor : call.outputs.first()) add_tensor(plan, tensor, call.outputs.role);
    return plans;
  }
  add_block_sizes(plan, call, carrier);
  add_inputs(plan, call, carrier);
  add_outputs(plan, call, carrier);
  return plans;
}

void check_apart(const CallDesc& call) {
  const Operand& outputs = call.outputs;
  if (!outputs.is_lists()) return check::apart(call.op, outputs.list(), call.inputs.first().vec());
  if (call.inputs.list().size() < 2) return;
  check::apart(call.op, outputs.flat());
  for (const auto& list : outputs.lists()) check::apart(call.op, list, call.inputs.list());
}

c10::Device device_of(const CallDesc& call) {
  std::optional<c10::Device> device;
  for (const Operand* operand : {&call.inputs, &call.outputs}) {
    const bool written = operand->role != Role::kRead;
    operand->for_each([&](const at::Tensor& tensor) {
      // An undefined one is refused by its name later.
      if (tensor.defined()) check::on_device(call.op, tensor, written, device);
    });
  }
  return *device;
}

bool CallDesc::on_device() const {
  bool found = false;
  const auto look = [&](const at::Tensor& tensor) { found = found || (tensor.defined() && !tensor.is_cpu()); };
  inputs.for_each(look);
  outputs.for_each(look);
  return found;
}

c10::ArrayRef<at::Tensor> Operand::part(size_t i) const {
  switch (form_) {
    case Form::kTensor:
      return tensor();
    case Form::kList:
      return list();
    case Form::kLists:
      return lists()[i];
    case Form::kNone:
      break;
  }
  return {};
}

Operand::Tensors Operand::flat() const {
  Tensors all;
  for_each([&](const at::Tensor& tensor) { all.push_back(tensor); });
  return all;
}

Operand Replaced::copied(const Operand& original, const Replace& replace, Argument& to) {
  const auto with = [&](const at::Tensor& tensor) {
    return tensor.defined() ? replace(tensor, original.role) : tensor;
  };
  const auto list = [&](const Operand::Tensors& tensors) {
    Operand::Tensors copies;
    for (const at::Tensor& tensor : tensors) copies.push_back(with(tensor));
    return copies;
  };
  if (original.is_lists()) {
    for (const auto& tensors : original.lists()) to.lists.push_back(list(tensors));
    return {to.lists, original.role, original.blocks};
  }
  if (original.is_list()) {
    to.list = list(original.list());
    return {to.list, original.role, original.blocks};
  }
  if (!original.present()) return original;
  to.tensor = with(original.tensor());
  return {to.tensor, original.role, original.blocks};
}

Replaced::Replaced(const CallDesc& original, const Replace& replace) : call_(original) {
  call_.inputs = copied(original.inputs, replace, inputs_);
  call_.outputs = copied(original.outputs, replace, outputs_);
}

}  // namespace sagellm
