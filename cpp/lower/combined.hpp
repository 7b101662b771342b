// Combines two tensors by torch's operators, where neither the core nor a vendor's library does it.
#pragma once

#include <ATen/ATen.h>

#include "compat.hpp"

namespace sagellm {

// `left` and `right` have one type. For an average this is the sum, which the caller divides later.
inline at::Tensor combined(const at::Tensor& left, const at::Tensor& right, c10d::ReduceOp::RedOpType op) {
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

}  // namespace sagellm
