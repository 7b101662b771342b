#include "python/bindings.hpp"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "host/errors.hpp"

namespace sagellm {

namespace {

// The tensor, if it is contiguous in host memory and its bytes are its whole value; else null.
const at::Tensor* plain(py::handle item) {
  if (!THPVariable_CheckExact(item.ptr())) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(item.ptr());
  constexpr c10::DispatchKeySet lazy(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  const bool fits = tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.has_storage() &&
                    !tensor.key_set().has_any(lazy) && tensor.is_contiguous();
  return fits ? &tensor : nullptr;
}

struct Range {
  const char* begin;
  const char* end;
};

// True if two of the ranges have a byte in common. Sorts them.
bool overlap(std::vector<Range>& ranges) {
  const auto before = [](const Range& a, const Range& b) { return a.begin < b.begin; };
  if (!std::is_sorted(ranges.begin(), ranges.end(), before)) std::sort(ranges.begin(), ranges.end(), before);
  return std::adjacent_find(ranges.begin(), ranges.end(),
                            [](const Range& a, const Range& b) { return b.begin < a.end; }) != ranges.end();
}

// One entry for each run of equal tensors: dtype, shape, count. None if a tensor is not plain. If the tensors will be
// written, also None if one of them requires a gradient or two of them share memory. The list keeps the tensors alive,
// and the GIL keeps the list unchanged.
py::object runs(const py::list& tensors, bool written) {
  py::list found;
  std::vector<Range> ranges;
  const at::Tensor* first = nullptr;
  int64_t count = 0;
  const auto close = [&] {
    if (first == nullptr) return;
    py::tuple shape(first->dim());
    for (int64_t side = 0; side < first->dim(); ++side) shape[side] = first->size(side);
    const auto dtype =
        py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(first->scalar_type())));
    found.append(py::make_tuple(dtype, shape, count));
  };
  for (const py::handle item : tensors) {
    const at::Tensor* const tensor = plain(item);
    if (tensor == nullptr || (written && tensor->requires_grad())) return py::none();
    if (const size_t bytes = tensor->nbytes(); written && bytes > 0) {
      const auto* const begin = static_cast<const char*>(tensor->const_data_ptr());
      ranges.push_back({begin, begin + bytes});
    }
    if (first != nullptr && tensor->scalar_type() == first->scalar_type() && tensor->sizes() == first->sizes()) {
      ++count;
      continue;
    }
    close();
    first = tensor;
    count = 1;
  }
  close();
  if (overlap(ranges)) return py::none();
  return found;
}

// Calls `copy(tensor, place, bytes)` for each tensor from index `begin` to before `end`. `place` is the address of the
// tensor's bytes in the packed memory, `bytes` their number.
template <class Copy>
void each(const char* call, const py::list& tensors, size_t begin, size_t end, const at::Tensor& packed,
          const Copy& copy) {
  if (!packed.is_cpu() || !packed.is_contiguous() || begin > end || end > tensors.size()) {
    value_error(call, "the packed bytes are not contiguous on cpu, or the list is shorter than it was");
  }
  auto* place = static_cast<char*>(packed.data_ptr());
  size_t left = packed.nbytes();
  for (size_t number = begin; number < end; ++number) {
    const at::Tensor* const tensor = plain(tensors[number]);
    if (tensor == nullptr || tensor->nbytes() > left) {
      value_error(call, c10::str("tensor ", number, " of the list has changed during the call"));
    }
    const size_t bytes = tensor->nbytes();
    if (bytes > 0) copy(*tensor, place, bytes);
    place += bytes;
    left -= bytes;
  }
  if (left > 0) value_error(call, "the tensors of the list have become smaller during the call");
}

void pack(const py::list& tensors, size_t begin, size_t end, const at::Tensor& into) {
  each("send_tensors", tensors, begin, end, into,
       [](const at::Tensor& tensor, char* place, size_t bytes) { std::memcpy(place, tensor.const_data_ptr(), bytes); });
}

void unpack(const at::Tensor& from, const py::list& tensors, size_t begin, size_t end) {
  each("recv_tensors", tensors, begin, end, from, [](const at::Tensor& tensor, const char* place, size_t bytes) {
    std::memcpy(tensor.mutable_data_ptr(), place, bytes);
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  });
}

}  // namespace

std::vector<at::Tensor> tensors_of(const char* call, const py::list& list, size_t begin, size_t end) {
  if (begin > end || end > list.size()) value_error(call, "the list has become shorter during the call");
  std::vector<at::Tensor> tensors;
  tensors.reserve(end - begin);
  for (size_t number = begin; number < end; ++number) {
    PyObject* const item = PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(number));
    if (!THPVariable_Check(item)) value_error(call, c10::str("element ", number, " is not a tensor any more"));
    tensors.push_back(THPVariable_Unpack(item));
    // Most tensors of such subclasses have no memory of their own; only Python knows the tensors that they wrap.
    if (tensors.back().key_set().has(c10::DispatchKey::Python)) {
      value_error(call, c10::str("element ", number, " is a subclass of Tensor with its own __torch_dispatch__"));
    }
  }
  return tensors;
}

void bind_packing(py::module_& module) {
  define(module, "_runs", &runs, "tensors"_a, "written"_a);
  define(module, "_pack", &pack, "tensors"_a, "begin"_a, "end"_a, "into"_a);
  define(module, "_unpack", &unpack, "from_"_a, "tensors"_a, "begin"_a, "end"_a);
}

}  // namespace sagellm
