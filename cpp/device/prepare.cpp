#include "device/prepare.hpp"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "host/errors.hpp"
#include "lower/types.hpp"

namespace sagellm {

namespace {

size_t total(const Pieces& pieces) {
  return std::accumulate(pieces.begin(), pieces.end(), size_t{0},
                         [](size_t sum, const Piece& piece) { return sum + piece.bytes; });
}

Piece piece_of(const at::Tensor& tensor) {
  return {reinterpret_cast<size_t>(tensor.data_ptr()), tensor.nbytes()};
}

// True where the pieces lie behind each other.
bool is_run(const Pieces& pieces) {
  for (size_t i = 1; i < pieces.size(); ++i) {
    if (pieces[i].addr != pieces[i - 1].addr + pieces[i - 1].bytes) return false;
  }
  return true;
}

Pieces as_run(const Pieces& pieces) {
  if (pieces.empty()) return {};
  return {Piece{pieces[0].addr, total(pieces)}};
}

bool any_overlap(const Pieces& left, const Pieces& right) {
  return std::any_of(left.begin(), left.end(), [&](const Piece& a) {
    return std::any_of(right.begin(), right.end(), [&](const Piece& b) { return overlap(a, b); });
  });
}

// Sizes of the ranks' blocks, which are equal where the plan names none.
std::vector<size_t> block_bytes(const std::vector<size_t>& blocks, size_t bytes, size_t ranks) {
  return blocks.empty() ? std::vector<size_t>(ranks, bytes / ranks) : blocks;
}

// One piece for each rank, if every block lies in one run.
std::optional<Pieces> per_rank(const Pieces& pieces, const std::vector<size_t>& blocks) {
  Pieces found;
  size_t at = 0;      // piece
  size_t offset = 0;  // in it
  for (const size_t bytes : blocks) {
    Piece block{0, 0};
    while (block.bytes < bytes) {
      if (at == pieces.size()) return std::nullopt;
      const size_t start = pieces[at].addr + offset;
      if (block.bytes > 0 && start != block.addr + block.bytes) return std::nullopt;
      if (block.bytes == 0) block.addr = start;
      const size_t take = std::min(bytes - block.bytes, pieces[at].bytes - offset);
      block.bytes += take;
      offset += take;
      if (offset == pieces[at].bytes) {
        ++at;
        offset = 0;
      }
    }
    found.push_back(block);
  }
  return found;
}

// The blocks of a tensor that holds them behind each other.
Pieces cut(const at::Tensor& tensor, const std::vector<size_t>& blocks) {
  Pieces found;
  size_t next = piece_of(tensor).addr;
  for (const size_t bytes : blocks) {
    found.push_back({next, bytes});
    next += bytes;
  }
  return found;
}

std::vector<at::Tensor> tensors_over(const Pieces& pieces, at::ScalarType type, c10::Device device) {
  std::vector<at::Tensor> found;
  const size_t item = c10::elementSize(type);
  for (const Piece& piece : pieces) {
    found.push_back(at_address(piece.addr, {static_cast<int64_t>(piece.bytes / item)}, type, device));
  }
  return found;
}

at::Tensor empty(int64_t elements, at::ScalarType type, c10::Device device) {
  return at::empty({elements}, at::TensorOptions().dtype(type).device(device));
}

// Only bits are moved below, and torch's kernels for lists know not every type: integers of the same width stand for
// all.
at::ScalarType bits_of(at::ScalarType type) {
  switch (c10::elementSize(type)) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    case 8:
      return at::kLong;
    default:
      return at::kComplexDouble;
  }
}

at::Tensor gathered(const Pieces& pieces, at::ScalarType type, c10::Device device) {
  const auto item = static_cast<size_t>(c10::elementSize(type));
  at::Tensor all = empty(static_cast<int64_t>(total(pieces) / item), type, device);
  // One kernel for many pieces, where the device has such.
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor bits = all.view(bits_of(type));
  at::cat_out(bits, tensors_over(pieces, bits_of(type), device));
  return all;
}

void scattered(const at::Tensor& all, const Pieces& pieces, at::ScalarType type, c10::Device device) {
  const std::vector<at::Tensor> parts = tensors_over(pieces, bits_of(type), device);
  const at::Tensor bits = all.view(bits_of(type));
  std::vector<at::Tensor> slices;
  int64_t at = 0;
  for (const at::Tensor& part : parts) {
    slices.push_back(bits.narrow(0, at, part.numel()));
    at += part.numel();
  }
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::_foreach_copy_(parts, slices);
}

// torch has few operators for unsigned types of more than a byte. Two and four bytes fit into eight, and what is cast
// back wraps; eight bytes are the same bits for sums, products and whatever works bit by bit.
bool is_wide_unsigned(at::ScalarType type) {
  return type == at::kUInt16 || type == at::kUInt32 || type == at::kUInt64;
}

at::Tensor as_signed(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kUInt64 ? tensor.view(at::kLong) : tensor.to(at::kLong);
}

at::Tensor as_unsigned(const at::Tensor& tensor, at::ScalarType type) {
  return type == at::kUInt64 ? tensor.view(type) : tensor.to(type);
}

// Of eight unsigned bytes, kept in signed ones.
at::Tensor divided_unsigned(const at::Tensor& tensor, int64_t count) {
  const at::Tensor half = at::bitwise_and(at::__rshift__(tensor, 1), INT64_MAX);
  const at::Tensor quotient = at::div(half, count, "trunc") * 2;
  // Less than twice the count, so its sign says nothing false.
  const at::Tensor rest = tensor - quotient * count;
  return quotient + at::ge(rest, count).to(at::kLong);
}

// By a factor that lies on the device, and stays there.
at::Tensor scaled(const at::Tensor& tensor, const at::Tensor& factor) {
  const at::ScalarType type = tensor.scalar_type();
  if (is_wide_unsigned(type)) return as_unsigned(as_signed(tensor) * factor.to(at::kLong), type);
  // A tensor without dimensions does not widen the other; integers take the factor without its fraction.
  return tensor * (at::isIntegralType(type, true) ? factor.to(type) : factor);
}

at::Tensor scaled(const at::Tensor& tensor, double factor) {
  const at::ScalarType type = tensor.scalar_type();
  if (is_wide_unsigned(type)) return as_unsigned(as_signed(tensor) * static_cast<int64_t>(factor), type);
  if (at::isIntegralType(tensor.scalar_type(), true)) return tensor * static_cast<int64_t>(factor);
  return tensor * factor;
}

at::Tensor divided(const at::Tensor& tensor, int64_t count) {
  const at::ScalarType type = tensor.scalar_type();
  if (type == at::kUInt64) return as_unsigned(divided_unsigned(as_signed(tensor), count), type);
  if (is_wide_unsigned(type)) return as_unsigned(at::div(as_signed(tensor), count, "trunc"), type);
  if (at::isIntegralType(tensor.scalar_type(), true)) return at::div(tensor, count, "trunc").to(tensor.scalar_type());
  return at::div(tensor, count);
}

at::Tensor combined(const at::Tensor& left, const at::Tensor& right, c10d::ReduceOp::RedOpType op) {
  using Op = c10d::ReduceOp;
  switch (op) {
    case Op::PRODUCT:
      return left * right;
    case Op::MIN:
      return at::minimum(left, right);
    case Op::MAX:
      return at::maximum(left, right);
    case Op::BAND:
      return at::bitwise_and(left, right);
    case Op::BOR:
      return at::bitwise_or(left, right);
    case Op::BXOR:
      return at::bitwise_xor(left, right);
    default:
      return left + right;
  }
}

// Blocks of all ranks, one behind the other, in the order of the ranks; two-byte floats are rounded once.
at::Tensor folded(const at::Tensor& all, int ranks, ReduceOp op) {
  const at::ScalarType type = all.scalar_type();
  const bool low = type == at::kHalf || type == at::kBFloat16;
  const auto reduce_op = static_cast<c10d::ReduceOp::RedOpType>(op);
  // Signed numbers compare as unsigned ones do when the highest bit is turned.
  const bool turned = type == at::kUInt64 && (reduce_op == c10d::ReduceOp::MIN || reduce_op == c10d::ReduceOp::MAX);
  at::Tensor numbers = low ? all.to(at::kFloat) : is_wide_unsigned(type) ? as_signed(all) : all;
  if (turned) numbers = at::bitwise_xor(numbers, INT64_MIN);
  const at::Tensor blocks = numbers.view({ranks, -1});
  at::Tensor sum = blocks[0];
  for (int rank = 1; rank < ranks; ++rank) sum = combined(sum, blocks[rank], reduce_op);
  if (turned) sum = at::bitwise_xor(sum, INT64_MIN);
  return is_wide_unsigned(type) ? as_unsigned(sum, type) : sum.to(type);
}

// `factor` is undefined where the steps say it.
at::Tensor applied(at::Tensor tensor, const rust::Vec<Local>& steps, int ranks, const at::Tensor& factor = {}) {
  for (const Local& step : steps) {
    switch (step.step) {
      case LocalStep::Cast:
        tensor = tensor.to(scalar_type(step.dtype));
        break;
      case LocalStep::Scale:
        tensor = factor.defined() ? scaled(tensor, factor) : scaled(tensor, step.factor);
        break;
      case LocalStep::Divide:
        tensor = divided(tensor, static_cast<int64_t>(step.count));
        break;
      case LocalStep::Fold:
        tensor = folded(tensor, ranks, step.op);
        break;
    }
  }
  return tensor;
}

bool has_blocks_to_send(Kind kind) {
  return kind == Kind::kScatter || kind == Kind::kReduceScatter || kind == Kind::kAllToAll;
}

bool has_blocks_to_receive(Kind kind) {
  return kind == Kind::kAllGather || kind == Kind::kGather || kind == Kind::kAllToAll;
}

// Whether the library can be given these pieces as they are; then `wire` is set to what it gets.
bool fits(const Pieces& pieces, const std::vector<size_t>& blocks, bool in_blocks, const DeviceRecipe& how,
          Pieces& wire) {
  if (pieces.empty() && in_blocks) {
    wire.assign(blocks.size(), Piece{0, 0});
    return true;
  }
  if (is_run(pieces) && (!in_blocks || blocks.empty())) {
    wire = as_run(pieces);
    return true;
  }
  if (!in_blocks || (how.flat && !is_run(pieces))) return false;
  const auto found = per_rank(pieces, blocks);
  if (found) wire = *found;
  return found.has_value();
}

}  // namespace

at::Tensor at_address(size_t address, at::IntArrayRef sizes, at::ScalarType type, c10::Device device) {
  const auto options = at::TensorOptions().dtype(type).device(device);
  return at::for_blob(reinterpret_cast<void*>(address), sizes).options(options).target_device(device).make_tensor();
}

bool elements_in_order(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return true;
  // Present from the moment on that such tensors can exist, so a process without it asks again.
  static const c10::OperatorName name(kFormatOperator, "");
  const auto query = c10::Dispatcher::singleton().findSchema(name);
  if (!query.has_value()) return true;
  const auto format = query->typed<int64_t(const at::Tensor&)>().call(tensor);
  return std::find(std::begin(kPlainFormats), std::end(kPlainFormats), format) != std::end(kPlainFormats);
}

DeviceRequest request(const Plan& plan, bool plain) {
  const Call& call = plan.call;
  DeviceRequest found{};
  found.name = plan.op;
  found.kind = call.kind;
  // Where data is only moved, the core is told bytes, and a device may have no room for them all the same.
  found.dtype = call.dtype;
  if (call.dtype == Dtype::kBytes && call.element != kNoType) {
    found.dtype = dtype_of(static_cast<at::ScalarType>(call.element)).value_or(Dtype::kBytes);
  }
  found.op = call.op;
  found.factor = call.factor;
  found.even = plan.in_blocks.empty() && plan.out_blocks.empty();
  found.plain = plain;
  found.root = call.root;
  found.tag = call.tag;
  for (const Piece& piece : plan.inputs()) found.read += piece.bytes;
  for (const Piece& piece : plan.outputs()) found.written += piece.bytes;
  found.counts = call.counts;
  found.tensors = call.tensors;
  found.element = call.element;
  found.site = call.site;
  return found;
}

namespace {

// One call between the caller's memory and the library's.
struct Preparation {
  const Plan& plan;
  const DeviceRecipe& how;
  const int ranks;
  const c10::Device device;
  std::vector<at::Tensor>& keep;
  const Kind asked_kind = plan.call.kind;
  const Kind kind = how.kind;
  // Of the caller's tensors, and what the library moves.
  const at::ScalarType type =
      static_cast<at::ScalarType>(plan.call.element == kNoType ? static_cast<uint8_t>(at::kByte) : plan.call.element);
  const at::ScalarType wire = wire_type();
  const Pieces inputs{plan.inputs().begin(), plan.inputs().end()};
  const Pieces outputs{plan.outputs().begin(), plan.outputs().end()};

  at::ScalarType wire_type() const {
    at::ScalarType found = type;
    for (const Local& step : how.before) {
      if (step.step == LocalStep::Cast) found = scalar_type(step.dtype);
    }
    return found;
  }
  size_t on_wire(size_t bytes) const { return bytes / c10::elementSize(type) * c10::elementSize(wire); }
  std::vector<size_t> on_wire(std::vector<size_t> blocks) const {
    for (size_t& bytes : blocks) bytes = on_wire(bytes);
    return blocks;
  }

  // Sets what is sent; the temporary that it lies in, or undefined.
  at::Tensor send(Launch& launch) const {
    const bool in_blocks = has_blocks_to_send(asked_kind);
    const auto blocks =
        in_blocks ? block_bytes(plan.in_blocks, total(inputs), static_cast<size_t>(ranks)) : std::vector<size_t>();
    const bool as_it_lies =
        how.before.empty() && !how.spoils &&
        fits(inputs, plan.in_blocks.empty() && is_run(inputs) ? plan.in_blocks : blocks, in_blocks, how, launch.send);
    if (as_it_lies || inputs.empty()) return {};
    at::Tensor sent = applied(gathered(inputs, type, device), how.before, ranks, plan.factor).contiguous();
    keep.push_back(sent);
    launch.send = in_blocks ? cut(sent, on_wire(blocks)) : Pieces{piece_of(sent)};
    return sent;
  }

  // Sets where it arrives, and how it comes from there to the caller.
  void receive(Launch& launch, const at::Tensor& sent) const {
    if (outputs.empty() && !(kind == Kind::kAllGather && asked_kind == Kind::kAllReduce)) return;
    const bool in_blocks = has_blocks_to_receive(asked_kind);
    const auto blocks =
        in_blocks ? block_bytes(plan.out_blocks, total(outputs), static_cast<size_t>(ranks)) : std::vector<size_t>();
    const bool in_place = asked_kind == Kind::kAllReduce && kind == asked_kind && sent.defined() && !how.apart;
    const bool apart = how.apart && any_overlap(inputs, outputs) && !sent.defined();
    if (how.after.empty() && !apart && !in_place &&
        fits(outputs, plan.out_blocks.empty() && is_run(outputs) ? plan.out_blocks : blocks, in_blocks, how,
             launch.recv)) {
      return;
    }
    const at::Tensor received = in_place ? sent : room(launch, blocks, in_blocks);
    if (in_place) launch.recv = {piece_of(received)};
    keep.push_back(received);
    launch.after = [received, outputs = outputs, type = type, device = device, ranks = ranks,
                    steps = std::make_shared<rust::Vec<Local>>(how.after)] {
      scattered(applied(received, *steps, ranks), outputs, type, device);
    };
  }

  // A temporary for what arrives.
  at::Tensor room(Launch& launch, const std::vector<size_t>& blocks, bool in_blocks) const {
    const auto count = static_cast<size_t>(ranks);
    if (kind != asked_kind) {
      // All ranks' data come together here, in the type they were sent in.
      const size_t bytes = (kind == Kind::kAllToAll ? on_wire(total(outputs)) : total(launch.send)) * count;
      at::Tensor all = empty(static_cast<int64_t>(bytes / c10::elementSize(wire)), wire, device);
      launch.recv = cut(all, std::vector<size_t>(count, bytes / count));
      return all;
    }
    at::Tensor all = empty(static_cast<int64_t>(total(outputs) / c10::elementSize(type)), wire, device);
    launch.recv = in_blocks ? cut(all, on_wire(blocks)) : Pieces{piece_of(all)};
    return all;
  }
};

}  // namespace

Launch prepare(const Plan& plan, const DeviceRecipe& how, int ranks, c10::Device device,
               std::vector<at::Tensor>& keep) {
  const Preparation call{plan, how, ranks, device, keep};
  Launch launch;
  if (call.asked_kind == Kind::kBarrier) {
    const at::Tensor one = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(device));
    keep.push_back(one);
    launch.send = {piece_of(one)};
    launch.recv = launch.send;
    return launch;
  }
  if (how.premul && plan.factor.defined()) {
    keep.push_back(plan.factor.to(scalar_type(how.dtype)));
    launch.factor = piece_of(keep.back()).addr;
  }
  const at::Tensor sent = call.send(launch);
  call.receive(launch, sent);
  return launch;
}

}  // namespace sagellm
