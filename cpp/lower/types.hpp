// Maps element types and reduce ops between the bridge and torch. This is the only such table. If the installed torch
// contradicts it, compilation fails.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <iterator>
#include <optional>

#include "compat.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

// torch's type of each `Dtype`, in the order of the `Dtype` numbers. `kBytes` is data that is only moved; torch has no
// such type, so its elements are single bytes.
inline constexpr at::ScalarType kScalarTypes[] = {
    at::kByte,         at::kBool,          at::kByte,          at::kChar,        at::kUInt16,
    at::kShort,        at::kUInt32,        at::kInt,           at::kUInt64,      at::kLong,
    at::kHalf,         at::kBFloat16,      at::kFloat,         at::kDouble,      at::kComplexHalf,
    at::kComplexFloat, at::kComplexDouble, at::kFloat8_e4m3fn, at::kFloat8_e5m2,
};

constexpr at::ScalarType scalar_type(Dtype dtype) {
  return kScalarTypes[static_cast<size_t>(dtype)];
}

// The inverse: the `Dtype` of each of torch's type numbers; kBytes for types that the core does not combine.
inline constexpr auto kDtypes = [] {
  std::array<Dtype, static_cast<size_t>(at::ScalarType::NumOptions)> dtypes{};
  for (size_t number = 1; number < std::size(kScalarTypes); ++number) {
    dtypes[static_cast<size_t>(kScalarTypes[number])] = static_cast<Dtype>(number);
  }
  return dtypes;
}();

constexpr std::optional<Dtype> dtype_of(at::ScalarType type) {
  const Dtype dtype = kDtypes[static_cast<size_t>(type)];
  return dtype == Dtype::kBytes ? std::nullopt : std::optional(dtype);
}

static_assert(std::size(kScalarTypes) == static_cast<size_t>(Dtype::kF8E5M2) + 1);
static_assert(dtype_of(at::kBool) == Dtype::kBool && dtype_of(at::kByte) == Dtype::kU8);
static_assert(dtype_of(at::kChar) == Dtype::kI8 && dtype_of(at::kUInt16) == Dtype::kU16);
static_assert(dtype_of(at::kShort) == Dtype::kI16 && dtype_of(at::kUInt32) == Dtype::kU32);
static_assert(dtype_of(at::kInt) == Dtype::kI32 && dtype_of(at::kUInt64) == Dtype::kU64);
static_assert(dtype_of(at::kLong) == Dtype::kI64 && dtype_of(at::kHalf) == Dtype::kF16);
static_assert(dtype_of(at::kBFloat16) == Dtype::kBf16 && dtype_of(at::kFloat) == Dtype::kF32);
static_assert(dtype_of(at::kDouble) == Dtype::kF64 && dtype_of(at::kComplexHalf) == Dtype::kC32);
static_assert(dtype_of(at::kComplexFloat) == Dtype::kC64 && dtype_of(at::kComplexDouble) == Dtype::kC128);
static_assert(dtype_of(at::kFloat8_e4m3fn) == Dtype::kF8E4M3 && dtype_of(at::kFloat8_e5m2) == Dtype::kF8E5M2);

constexpr bool same_number(ReduceOp ours, c10d::ReduceOp::RedOpType theirs) {
  return static_cast<int>(ours) == static_cast<int>(theirs);
}

static_assert(same_number(ReduceOp::kSum, c10d::ReduceOp::SUM));
static_assert(same_number(ReduceOp::kAvg, c10d::ReduceOp::AVG));
static_assert(same_number(ReduceOp::kProduct, c10d::ReduceOp::PRODUCT));
static_assert(same_number(ReduceOp::kMin, c10d::ReduceOp::MIN));
static_assert(same_number(ReduceOp::kMax, c10d::ReduceOp::MAX));
static_assert(same_number(ReduceOp::kBand, c10d::ReduceOp::BAND));
static_assert(same_number(ReduceOp::kBor, c10d::ReduceOp::BOR));
static_assert(same_number(ReduceOp::kBxor, c10d::ReduceOp::BXOR));
static_assert(same_number(ReduceOp::kPremulSum, c10d::ReduceOp::PREMUL_SUM));
static_assert(static_cast<int>(c10d::ReduceOp::UNUSED) == static_cast<int>(ReduceOp::kPremulSum) + 1,
              "torch has a reduce op that the bridge does not know");

}  // namespace sagellm
