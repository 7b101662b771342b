#include "python/bindings.hpp"

#include <cstdint>
#include <type_traits>

#include "host/errors.hpp"
#include "lower/checks.hpp"
#include "sagellm/src/ffi/arrays.rs.h"

namespace sagellm {

namespace {

// The numbers of a tensor that can be read or written in place. Throws a ValueError for any other tensor.
template <class Number>
Number* memory(const at::Tensor& tensor, const char* name) {
  constexpr at::ScalarType kType = c10::CppTypeToScalarType<std::remove_const_t<Number>>::value;
  const auto address = reinterpret_cast<uintptr_t>(tensor.is_cpu() ? tensor.const_data_ptr() : nullptr);
  if (tensor.scalar_type() != kType || !tensor.is_cpu() || !tensor.is_contiguous() || address % alignof(Number) != 0) {
    value_error("extension", c10::str(name, " is a tensor of ", tensor.scalar_type(), " on ", tensor.device(),
                                      ", expected contiguous ", check::dtype_name(kType), " on cpu"));
  }
  return reinterpret_cast<Number*>(address);
}

template <class Number>
rust::Slice<const Number> read(const at::Tensor& tensor, const char* name) {
  const auto* const begin = memory<const Number>(tensor, name);
  if (tensor.numel() == 0) return {};
  return {begin, static_cast<size_t>(tensor.numel())};
}

// Bumps the tensor's version, so that autograd notices the change, as after any in-place call of torch.
template <class Number>
rust::Slice<Number> write(const at::Tensor& tensor, const char* name) {
  auto* const begin = memory<Number>(tensor, name);
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  if (tensor.numel() == 0) return {};
  return {begin, static_cast<size_t>(tensor.numel())};
}

void encode(const at::Tensor& values, size_t block, const at::Tensor& encoded) {
  const auto from = read<float>(values, "values");
  const auto into = write<uint8_t>(encoded, "encoded");
  without_gil([&] { checked([&] { int8_encode(from, block, into); }); });
}

void sum(const at::Tensor& addends, size_t block, float divisor, const at::Tensor& summed) {
  const auto from = read<uint8_t>(addends, "addends");
  const auto into = write<uint8_t>(summed, "summed");
  without_gil([&] { checked([&] { int8_sum(from, block, divisor, into); }); });
}

void decode(const at::Tensor& encoded, size_t block, const at::Tensor& values) {
  const auto from = read<uint8_t>(encoded, "encoded");
  const auto into = write<float>(values, "values");
  without_gil([&] { checked([&] { int8_decode(from, block, into); }); });
}

void find_largest(const at::Tensor& values, const at::Tensor& places) {
  const auto from = read<float>(values, "values");
  const auto into = write<int32_t>(places, "places");
  without_gil([&] { checked([&] { largest(from, into); }); });
}

// Holds the GIL: the lists of a mixture of experts are short, so releasing the GIL would take longer than the call.
void sort(const at::Tensor& experts, const at::Tensor& counts, const at::Tensor& order) {
  checked([&] {
    sort_assignments(read<int64_t>(experts, "experts"), write<int64_t>(counts, "counts"),
                     write<int64_t>(order, "order"));
  });
}

void figures(const at::Tensor& taken, size_t experts, size_t rank, const at::Tensor& found) {
  checked([&] { row_figures(read<int64_t>(taken, "taken"), experts, rank, write<int64_t>(found, "found")); });
}

void leaving(const at::Tensor& taken, size_t rank, const at::Tensor& order, const at::Tensor& wanted, size_t choices,
             const at::Tensor& rows, const at::Tensor& sources, const at::Tensor& places) {
  const auto counts = read<int64_t>(wanted, "wanted");
  const RowTable table{read<int64_t>(taken, "taken"), counts.size(), rank};
  checked([&] {
    rows_leaving(table, read<int64_t>(order, "order"), counts, choices, write<int64_t>(rows, "rows"),
                 write<int64_t>(sources, "sources"), write<int64_t>(places, "places"));
  });
}

void coming(const at::Tensor& taken, size_t experts, size_t rank, const at::Tensor& sorting,
            const at::Tensor& unsorted) {
  const RowTable table{read<int64_t>(taken, "taken"), experts, rank};
  checked([&] { rows_coming(table, write<int64_t>(sorting, "sorting"), write<int64_t>(unsorted, "unsorted")); });
}

}  // namespace

void bind_arrays(py::module_& module) {
  define(module, "_int8_encode", &encode, "values"_a, "block"_a, "encoded"_a);
  define(module, "_int8_sum", &sum, "addends"_a, "block"_a, "divisor"_a, "summed"_a);
  define(module, "_int8_decode", &decode, "encoded"_a, "block"_a, "values"_a);
  define(module, "_largest", &find_largest, "values"_a, "places"_a);
  define(module, "_sort_assignments", &sort, "experts"_a, "counts"_a, "order"_a);
  define(module, "_row_figures", &figures, "taken"_a, "experts"_a, "rank"_a, "found"_a);
  define(module, "_rows_leaving", &leaving, "taken"_a, "rank"_a, "order"_a, "wanted"_a, "choices"_a, "rows"_a,
         "sources"_a, "places"_a);
  define(module, "_rows_coming", &coming, "taken"_a, "experts"_a, "rank"_a, "sorting"_a, "unsorted"_a);
}

}  // namespace sagellm
