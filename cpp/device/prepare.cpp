#include "device/prepare.hpp"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "host/errors.hpp"
#include "lower/combined.hpp"
#include "lower/types.hpp"

namespace sagellm {

namespace {

at::TensorOptions on(c10::Device device, at::ScalarType type) {
  return at::TensorOptions().dtype(type).device(device);
}

// The list operations below only copy bits, but torch's kernels for lists do not support every element type. So they
// use another type of the same width: an integer type if there is one.
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

// Tensors over the caller's memory, with elements of `bits_of(type)`.
std::vector<at::Tensor> tensors_over(c10::ArrayRef<Piece> pieces, at::ScalarType type, c10::Device device) {
  const auto options = on(device, bits_of(type));
  std::vector<at::Tensor> found;
  for (const Piece& piece : pieces) {
    const auto elements = static_cast<int64_t>(piece.bytes / c10::elementSize(type));
    auto* const memory = reinterpret_cast<void*>(piece.addr);
    found.push_back(at::for_blob(memory, {elements}).options(options).target_device(device).make_tensor());
  }
  return found;
}

size_t address(const at::Tensor& tensor) {
  return reinterpret_cast<size_t>(tensor.data_ptr());
}

// torch has few operators for unsigned types wider than one byte. Numbers of two and four bytes are widened to eight,
// and the cast back wraps. Numbers of eight bytes are viewed as signed: sums, products and bitwise operations give the
// same bits.
template <class Body>
at::Tensor in_signed(const at::Tensor& numbers, const Body& body) {
  const at::ScalarType type = numbers.scalar_type();
  if (type == at::kUInt64) return body(numbers.view(at::kLong)).view(type);
  const bool wide = type == at::kUInt16 || type == at::kUInt32;
  return body(wide ? numbers.to(at::kLong) : numbers).to(type);
}

bool is_integral(const at::Tensor& tensor) {
  return at::isIntegralType(tensor.scalar_type(), true);
}

// Divides unsigned numbers of eight bytes, which are viewed as signed ones.
at::Tensor divided_unsigned(const at::Tensor& tensor, int64_t count) {
  const at::Tensor half = at::bitwise_and(at::__rshift__(tensor, 1), INT64_MAX);
  const at::Tensor quotient = at::div(half, count, "trunc") * 2;
  // The remainder is less than twice the count, so it is not negative as a signed number.
  const at::Tensor rest = tensor - quotient * count;
  return quotient + at::ge(rest, count).to(at::kLong);
}

at::Tensor divided(const at::Tensor& tensor, int64_t count) {
  if (tensor.scalar_type() == at::kUInt64) {
    return in_signed(tensor, [&](const at::Tensor& numbers) { return divided_unsigned(numbers, count); });
  }
  if (!is_integral(tensor)) return at::div(tensor, count);
  return in_signed(tensor, [&](const at::Tensor& numbers) { return at::div(numbers, count, "trunc"); });
}

// Multiplies by `factor`, a tensor that stays on the device, or by `number` if `factor` is undefined.
at::Tensor scaled(const at::Tensor& tensor, const at::Tensor& factor, double number) {
  return in_signed(tensor, [&](const at::Tensor& numbers) {
    // If the tensor has integers, the factor's fraction is dropped. `factor` has no dimensions, so it does not widen
    // the type of `numbers`.
    const bool whole = is_integral(numbers);
    if (factor.defined()) return numbers * (whole ? factor.to(numbers.scalar_type()) : factor);
    return whole ? numbers * static_cast<int64_t>(number) : numbers * number;
  });
}

// Combines the equal blocks of all ranks, which are adjacent in `all`, in the order of the ranks. Floats of two bytes
// are combined in float32 and rounded once.
at::Tensor folded(const at::Tensor& all, int ranks, ReduceOp op) {
  const at::ScalarType type = all.scalar_type();
  const bool low = type == at::kHalf || type == at::kBFloat16;
  const auto reduce_op = static_cast<c10d::ReduceOp::RedOpType>(op);
  // With the highest bit flipped, signed comparison orders the numbers as unsigned comparison does.
  const bool turned = type == at::kUInt64 && (reduce_op == c10d::ReduceOp::MIN || reduce_op == c10d::ReduceOp::MAX);
  const auto turn = [&](const at::Tensor& numbers) { return turned ? at::bitwise_xor(numbers, INT64_MIN) : numbers; };
  return in_signed(low ? all.to(at::kFloat) : all,
                   [&](const at::Tensor& numbers) {
                     const at::Tensor blocks = turn(numbers).view({ranks, -1});
                     at::Tensor sum = blocks[0];
                     for (int rank = 1; rank < ranks; ++rank) sum = combined(sum, blocks[rank], reduce_op);
                     return turn(sum);
                   })
      .to(type);
}

at::ScalarType type_of(const Plan& plan) {
  return static_cast<at::ScalarType>(plan.call.note.element == kNoType ? static_cast<uint8_t>(at::kByte)
                                                                       : plan.call.note.element);
}

// The element type that is sent: the target of the last cast before the library's call, or without a cast the caller's
// `type`.
at::ScalarType wire_type(const DeviceLowering& lowering, at::ScalarType type) {
  for (const Local& step : lowering.before) {
    if (step.step == LocalStep::Cast) type = scalar_type(step.dtype);
  }
  return type;
}

}  // namespace

bool is_dense(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return true;
  // The operator is registered before such tensors can exist. A process that lacks the operator looks it up again at
  // each call.
  static const c10::OperatorName name(kFormatOperator, "");
  const auto query = c10::Dispatcher::singleton().findSchema(name);
  if (!query.has_value()) return true;
  const auto format = query->typed<int64_t(const at::Tensor&)>().call(tensor);
  return std::find(std::begin(kPlainFormats), std::end(kPlainFormats), format) != std::end(kPlainFormats);
}

DeviceRequest request(const Plan& plan, bool dense) {
  DeviceRequest found{plan.op, plan.request(), dense};
  // A plan that only moves data has the dtype kBytes. The core needs the element type all the same, because a device
  // may lack it: some devices store 64-bit floats in 32 bits.
  if (plan.call.dtype == Dtype::kBytes && plan.call.note.element != kNoType) {
    found.request.call.dtype = dtype_of(type_of(plan)).value_or(Dtype::kBytes);
  }
  return found;
}

Preparation::Preparation(const Plan& plan, const DeviceLowering& lowering, int ranks, c10::Device device)
    : plan_(plan), lowering_(lowering), ranks_(ranks), device_(device), type_(type_of(plan)) {}

at::Tensor Preparation::gathered() const {
  // A barrier is carried out as an all_reduce of this one number.
  if (plan_.call.kind == Kind::kBarrier) return at::zeros({1}, on(device_, scalar_type(lowering_.dtype)));
  const auto parts = tensors_over(plan_.inputs(), type_, device_);
  int64_t elements = 0;
  for (const at::Tensor& part : parts) elements += part.numel();
  const at::Tensor all = at::empty({elements}, on(device_, type_));
  at::Tensor bits = all.view(bits_of(type_));
  // One kernel copies all pieces, if the device has such a kernel.
  at::cat_out(bits, parts);
  return applied(all, lowering_.before, plan_.factor).contiguous();
}

at::Tensor Preparation::applied(at::Tensor numbers, const rust::Vec<Local>& steps, const at::Tensor& factor) const {
  for (const Local& step : steps) {
    switch (step.step) {
      case LocalStep::Cast:
        numbers = numbers.to(scalar_type(step.dtype));
        break;
      case LocalStep::Scale:
        numbers = scaled(numbers, factor, step.factor);
        break;
      case LocalStep::Divide:
        numbers = divided(numbers, static_cast<int64_t>(step.count));
        break;
      case LocalStep::Fold:
        numbers = folded(numbers, ranks_, step.op);
        break;
    }
  }
  return numbers;
}

DevicePlaced Preparation::prepare(std::vector<at::Tensor>& keep) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  DevicePlaced placed{};
  if (lowering_.premul && plan_.factor.defined()) {
    keep.push_back(plan_.factor.to(scalar_type(lowering_.dtype)));
    placed.factor = address(keep.back());
  }
  if (lowering_.gathers) {
    keep.push_back(gathered());
    placed.send = address(keep.back());
    if (lowering_.in_place) received_ = keep.back();
  }
  if (lowering_.receives > 0) {
    const at::ScalarType wire = wire_type(lowering_, type_);
    const auto elements = static_cast<int64_t>(lowering_.receives / c10::elementSize(wire));
    received_ = at::empty({elements}, on(device_, wire));
    keep.push_back(received_);
    placed.recv = address(received_);
  }
  return placed;
}

void Preparation::store() const {
  if (!received_.defined() || plan_.outputs().empty()) return;
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor bits = applied(received_, lowering_.after).view(bits_of(type_));
  const auto parts = tensors_over(plan_.outputs(), type_, device_);
  std::vector<at::Tensor> slices;
  int64_t at = 0;
  for (const at::Tensor& part : parts) {
    slices.push_back(bits.narrow(0, at, part.numel()));
    at += part.numel();
  }
  at::_foreach_copy_(parts, slices);
}

}  // namespace sagellm
