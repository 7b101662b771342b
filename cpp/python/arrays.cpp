#include "python/arrays.hpp"

#include <torch/csrc/Exceptions.h>

#include <cstdint>

#include "host/errors.hpp"
#include "sagellm/src/ffi/arrays.rs.h"

namespace sagellm {

namespace {

using namespace py::literals;  // NOLINT(google-build-using-namespace): "name"_a

// The numbers of a tensor that can be read or written in place. Throws a ValueError for any other tensor.
template <class Number>
Number* memory(const at::Tensor& tensor, const char* name, const char* type, bool fits) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.is_cpu() ? tensor.const_data_ptr() : nullptr);
  if (!fits || !tensor.is_cpu() || !tensor.is_contiguous() || address % alignof(Number) != 0) {
    value_error("extension", c10::str(name, " is a tensor of ", tensor.scalar_type(), " on ", tensor.device(),
                                      ", expected contiguous ", type, " on cpu"));
  }
  return reinterpret_cast<Number*>(address);
}

template <class Number>
rust::Slice<const Number> read(const at::Tensor& tensor, const char* name, const char* type, bool fits) {
  const auto* const begin = memory<const Number>(tensor, name, type, fits);
  if (tensor.numel() == 0) return {};
  return {begin, static_cast<size_t>(tensor.numel())};
}

// Bumps the tensor's version, so that autograd notices the change, as after any in-place call of torch.
template <class Number>
rust::Slice<Number> write(const at::Tensor& tensor, const char* name, const char* type, bool fits) {
  auto* const begin = memory<Number>(tensor, name, type, fits);
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  if (tensor.numel() == 0) return {};
  return {begin, static_cast<size_t>(tensor.numel())};
}

rust::Slice<const float> floats(const at::Tensor& tensor, const char* name) {
  return read<float>(tensor, name, "float32", tensor.scalar_type() == at::kFloat);
}
rust::Slice<float> written_floats(const at::Tensor& tensor, const char* name) {
  return write<float>(tensor, name, "float32", tensor.scalar_type() == at::kFloat);
}
rust::Slice<const uint8_t> bytes(const at::Tensor& tensor, const char* name) {
  return read<uint8_t>(tensor, name, "uint8", tensor.scalar_type() == at::kByte);
}
rust::Slice<uint8_t> written_bytes(const at::Tensor& tensor, const char* name) {
  return write<uint8_t>(tensor, name, "uint8", tensor.scalar_type() == at::kByte);
}

rust::Slice<const int64_t> wholes(const at::Tensor& tensor, const char* name) {
  return read<int64_t>(tensor, name, "int64", tensor.scalar_type() == at::kLong);
}
rust::Slice<int64_t> written_wholes(const at::Tensor& tensor, const char* name) {
  return write<int64_t>(tensor, name, "int64", tensor.scalar_type() == at::kLong);
}

template <class Call>
void outside_gil(const Call& call) {
  const py::gil_scoped_release no_gil;
  checked(call);
}

void encode(const at::Tensor& values, size_t block, const at::Tensor& encoded) {
  const auto from = floats(values, "values");
  const auto into = written_bytes(encoded, "encoded");
  outside_gil([&] { int8_encode(from, block, into); });
}

void sum(const at::Tensor& addends, size_t block, float divisor, const at::Tensor& summed) {
  const auto from = bytes(addends, "addends");
  const auto into = written_bytes(summed, "summed");
  outside_gil([&] { int8_sum(from, block, divisor, into); });
}

void decode(const at::Tensor& encoded, size_t block, const at::Tensor& values) {
  const auto from = bytes(encoded, "encoded");
  const auto into = written_floats(values, "values");
  outside_gil([&] { int8_decode(from, block, into); });
}

void find_largest(const at::Tensor& values, const at::Tensor& places) {
  const auto from = floats(values, "values");
  const auto into = write<int32_t>(places, "places", "int32", places.scalar_type() == at::kInt);
  outside_gil([&] { largest(from, into); });
}

// Holds the GIL: the lists of a mixture of experts are short, so releasing the GIL would take longer than the call.
void sort(const at::Tensor& experts, const at::Tensor& counts, const at::Tensor& order) {
  checked([&] {
    sort_assignments(wholes(experts, "experts"), written_wholes(counts, "counts"), written_wholes(order, "order"));
  });
}

void figures(const at::Tensor& taken, size_t experts, size_t rank, const at::Tensor& found) {
  checked([&] { row_figures(wholes(taken, "taken"), experts, rank, written_wholes(found, "found")); });
}

void leaving(const at::Tensor& taken, size_t rank, bool own_last, const at::Tensor& order, const at::Tensor& wanted,
             const at::Tensor& rows, const at::Tensor& places) {
  const auto counts = wholes(wanted, "wanted");
  const RowTable table{wholes(taken, "taken"), counts.size(), rank, own_last};
  checked([&] {
    rows_leaving(table, wholes(order, "order"), counts, written_wholes(rows, "rows"), written_wholes(places, "places"));
  });
}

void coming(const at::Tensor& taken, size_t experts, size_t rank, bool own_last, const at::Tensor& sorting,
            const at::Tensor& unsorted) {
  const RowTable table{wholes(taken, "taken"), experts, rank, own_last};
  checked([&] { rows_coming(table, written_wholes(sorting, "sorting"), written_wholes(unsorted, "unsorted")); });
}

}  // namespace

void bind_arrays(py::module_& module) {
  const auto def = [&](const char* name, auto function, const auto&... arguments) {
    module.def(name, torch::wrap_pybind_function(function), arguments...);
  };
  def("_int8_encode", &encode, "values"_a, "block"_a, "encoded"_a);
  def("_int8_sum", &sum, "addends"_a, "block"_a, "divisor"_a, "summed"_a);
  def("_int8_decode", &decode, "encoded"_a, "block"_a, "values"_a);
  def("_largest", &find_largest, "values"_a, "places"_a);
  def("_sort_assignments", &sort, "experts"_a, "counts"_a, "order"_a);
  def("_row_figures", &figures, "taken"_a, "experts"_a, "rank"_a, "found"_a);
  def("_rows_leaving", &leaving, "taken"_a, "rank"_a, "own_last"_a, "order"_a, "wanted"_a, "rows"_a, "places"_a);
  def("_rows_coming", &coming, "taken"_a, "experts"_a, "rank"_a, "own_last"_a, "sorting"_a, "unsorted"_a);
}

}  // namespace sagellm
