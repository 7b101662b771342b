#include "lower/call.hpp"

#include <algorithm>
#include <utility>

#include "host/errors.hpp"
#include "host/sites.hpp"
#include "host/slices.hpp"
#include "lower/checks.hpp"
#include "lower/gloo_lists.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

namespace {

using View = c10::ArrayRef<at::Tensor>;

// True if `part` is exactly block `rank` of the contiguous tensor `whole`. This is the in-place form of a gathering or
// scattering call, which the core allows.
bool is_block(const at::Tensor& part, const at::Tensor& whole, int rank) {
  return part.is_contiguous() && whole.is_contiguous() &&
         static_cast<const char*>(part.const_data_ptr()) ==
             static_cast<const char*>(whole.const_data_ptr()) + static_cast<size_t>(rank) * part.nbytes();
}

// True if `part` needs a temporary: it overlaps `whole` but is not exactly this rank's block of it.
bool collides(const at::Tensor& part, const at::Tensor& whole, int rank) {
  return overlap(part, whole) && !is_block(part, whole, rank);
}

// Like the function above, but the ranks' blocks are a list of tensors.
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

// True if `tensor`, which is one block, needs a temporary: it overlaps the other argument in blocks that it may not
// share. `place` is the index of `tensor` in its list.
bool aside(const CallDesc& call, const at::Tensor& tensor, size_t place, const Operand& other, int rank) {
  const View blocks = other.first();
  if (call.kind == Kind::kAllToAll) return overlaps_any(tensor, blocks);
  if (other.blocks == Blocks::kPerRank) return collides(tensor, blocks, rank);
  return place < blocks.size() && collides(tensor, blocks[place], rank);
}

Plan& add_plan(Plans& plans, const CallDesc& call, const Carrier& carrier) {
  Plan& plan = plans.emplace_back(call.op, call.kind, call.timeout, carrier.vendor);
  plan.call.root = static_cast<uint32_t>(call.root);
  plan.call.tag = static_cast<uint32_t>(call.tag);
  return plan;
}

void add_inputs(Plan& plan, const CallDesc& call, const Carrier& carrier) {
  if (call.inputs.rows != nullptr) return plan.read_rows(call.inputs.tensor(), *call.inputs.rows);
  const Operand& outputs = call.outputs;
  const bool several = call.coalesced && outputs.is_lists();
  const Operand::Tensors all = several ? outputs.flat() : Operand::Tensors();
  const bool gathers = call.inputs.blocks == Blocks::kOwn || call.kind == Kind::kAllToAll;
  const View in = call.inputs.first();
  for (size_t i = 0; i < in.size(); ++i) {
    plan.read(in[i], several ? overlaps_any(in[i], all) : gathers && aside(call, in[i], i, outputs, carrier.rank));
  }
}

void add_outputs(Plan& plan, const CallDesc& call, const Carrier& carrier) {
  const Operand& outputs = call.outputs;
  if (outputs.rows != nullptr) return plan.write_rows(outputs.tensor(), *outputs.rows);
  if (call.coalesced && outputs.is_lists()) return plan.write_all(outputs.flat());
  const View out = outputs.first();
  if (outputs.blocks == Blocks::kPerRank) return plan.write_all(out);
  if (call.coalesced) return plan.write_blocks(out, static_cast<size_t>(carrier.size));
  const bool scatters = outputs.blocks == Blocks::kOwn;
  for (const at::Tensor& tensor : out) {
    plan.write(tensor, scatters && aside(call, tensor, 0, call.inputs, carrier.rank));
  }
}

// Sets the sizes of the ranks' blocks if they may differ.
void add_block_sizes(Plan& plan, const CallDesc& call, const Carrier& carrier) {
  if (call.inputs.blocks == Blocks::kSplits) {
    check::Splits splits = check::splits(call, carrier.size);
    plan.in_blocks = std::move(splits.inputs);
    plan.out_blocks = std::move(splits.outputs);
  } else if (!call.coalesced) {
    // An all_to_all needs the sizes even if all are equal on this rank, because the sizes on another rank may differ.
    const bool always = call.kind == Kind::kAllToAll;
    if (call.inputs.blocks == Blocks::kPerRank) plan.in_blocks = block_sizes(call.inputs.first(), always);
    if (call.outputs.blocks == Blocks::kPerRank) plan.out_blocks = block_sizes(call.outputs.first(), always);
  }
}

// Makes the requests for a list whose tensors are combined. The core decides which tensors form one operation
// (`fusion::lists`).
void add_combined_list(Plans& plans, const CallDesc& call, const Carrier& carrier) {
  const Operand::Tensors& outputs = call.outputs.list();
  const bool scatters = !call.has_one_argument();
  const Operand::Tensors& inputs = scatters ? call.inputs.list() : outputs;
  std::vector<uint8_t> elements;
  std::vector<size_t> bytes;
  for (const at::Tensor& tensor : inputs) {
    elements.push_back(static_cast<uint8_t>(tensor.scalar_type()));
    bytes.push_back(tensor.nbytes());
  }
  const rust::Vec<uint32_t> operations = checked([&] {
    const auto of = carrier.vendor ? &RustDevices::list_operations : &RustGroup::list_operations;
    return of(call.kind, slice(elements), slice(bytes));
  });
  // gloo combines copies of the tensors and stores the results in list order, so the list may contain a tensor twice.
  const std::vector<bool> twice =
      carrier.gloo_lists && !scatters ? in_overlaps(outputs) : std::vector<bool>(outputs.size());
  // Inputs of each operation. The blocks of a reduce_scatter interleave, so one call of `read_blocks` must get all of
  // them.
  std::vector<Operand::Tensors> blocks;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const size_t operation = operations[i];
    if (operation == plans.size()) {
      Plan& next = add_plan(plans, call, carrier);
      next.combine(inputs[i], *call.reduce_op);
      next.call.note.counts = operation == 0;
      next.call.note.tensors = 0;
      blocks.emplace_back();
    }
    Plan& plan = plans[operation];
    ++plan.call.note.tensors;
    if (!scatters) {
      plan.update(outputs[i], twice[i]);
      continue;
    }
    plan.write(outputs[i], aside(call, outputs[i], i, call.inputs, carrier.rank));
    blocks[operation].push_back(inputs[i]);
  }
  if (inputs.size() > 1) {
    std::vector<Listed> list;
    list.reserve(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) list.push_back({plans[operations[i]].call.dtype, bytes[i]});
    for (Plan& plan : plans) plan.list = list;
  }
  for (size_t i = 0; scatters && i < plans.size(); ++i) {
    plans[i].read_blocks(blocks[i], static_cast<size_t>(carrier.size));
  }
}

size_t bytes_of(const Operand& operand) {
  size_t bytes = 0;
  // Undefined and sparse tensors have no byte count; the delegate checks them.
  operand.for_each(
      [&](const at::Tensor& tensor) { bytes += tensor.defined() && !tensor.is_sparse() ? tensor.nbytes() : 0; });
  return bytes;
}

}  // namespace

Plans lower(const CallDesc& call, const Carrier& carrier) {
  Plans plans;
  if (C10_UNLIKELY(carrier.gloo_lists) && is_gloo_list(call)) {
    lower_gloo_list(add_plan(plans, call, carrier), call, carrier);
    return plans;
  }
  check::call(call, carrier);
  if (call.coalesced && call.reduce_op != nullptr) {
    add_combined_list(plans, call, carrier);
    return plans;
  }
  Plan& plan = add_plan(plans, call, carrier);
  if (call.reduce_op != nullptr) plan.combine(call.outputs.first()[0], *call.reduce_op);
  if (call.coalesced) {
    plan.call.note.tensors = static_cast<uint32_t>(call.traced().size());
    if (!call.is_message()) plan.note_list(call.inputs.list());
  }
  if (call.has_one_argument()) {
    if (call.outputs.rows != nullptr) {
      const at::Tensor& tensor = call.outputs.first()[0];
      const auto add = call.outputs.role == Role::kRead ? &Plan::read_rows : &Plan::write_rows;
      (plan.*add)(tensor, *call.outputs.rows);
      return plans;
    }
    for (const at::Tensor& tensor : call.outputs.first()) plan.add(tensor, call.outputs.role);
    if (call.is_message()) plan.join_neighbours();
    return plans;
  }
  add_block_sizes(plan, call, carrier);
  add_inputs(plan, call, carrier);
  add_outputs(plan, call, carrier);
  return plans;
}

ExternalOp external_op(const CallDesc& call, bool host_staged) {
  ExternalOp told{};
  told.kind = call.kind;
  told.root = static_cast<uint32_t>(call.root);
  told.tag = static_cast<uint32_t>(call.tag);
  const size_t outputs = bytes_of(call.outputs);
  // A collective with one argument is recorded as reading and writing it, on every rank.
  told.read = !call.has_one_argument() ? bytes_of(call.inputs) : call.kind == Kind::kRecv ? 0 : outputs;
  told.written = call.kind == Kind::kSend ? 0 : outputs;
  const auto like = call.traced();
  told.note.counts = true;
  told.note.tensors = call.coalesced ? static_cast<uint32_t>(like.size()) : 1;
  told.note.element = kNoType;
  for (const auto& tensors : {call.outputs.first(), like}) {
    if (!tensors.empty() && tensors[0].defined()) told.note.element = static_cast<uint8_t>(tensors[0].scalar_type());
  }
  told.note.site = call_site();
  told.note.host_staged = host_staged;
  told.timeout_ms = call.timeout.count();
  return told;
}

Operand::Tensors Operand::flat() const {
  if (!is_lists()) return first_.vec();
  Tensors all;
  for_each([&](const at::Tensor& tensor) { all.push_back(tensor); });
  return all;
}

Operand Replaced::copied(const Operand& original, const Replace& replace, Operand::Lists& to) {
  for (size_t i = 0; i < original.parts(); ++i) {
    Operand::Tensors& copies = to.emplace_back();
    for (const at::Tensor& tensor : original.part(i)) {
      copies.push_back(tensor.defined() ? replace(tensor, original.role) : tensor);
    }
  }
  if (!original.present()) return original;
  if (original.is_lists()) return {to, original.role, original.blocks};
  if (original.is_list()) return {to[0], original.role, original.blocks};
  return {to[0][0], original.role, original.blocks};
}

Replaced::Replaced(const CallDesc& original, const Replace& replace) : call_(original) {
  call_.inputs = copied(original.inputs, replace, inputs_);
  call_.outputs = copied(original.outputs, replace, outputs_);
}

}  // namespace sagellm
