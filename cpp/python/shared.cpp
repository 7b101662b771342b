#include "python/shared.hpp"

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <vector>

#include "host/allocator.hpp"
#include "python/observe.hpp"
#include "sagellm/src/ffi/memory.rs.h"

namespace sagellm {

namespace {

using namespace py::literals;  // NOLINT(google-build-using-namespace): "name"_a

at::Tensor make_shared_tensor(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                              at::ScalarType type) {
  return shared_tensor(sizes, strides, type);
}

// Allocates and frees memory like a caller that keeps addresses without their deleters. Returns whether peers could
// reach the memory.
bool share_raw(size_t bytes) {
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  void* const at = allocator.raw_allocate(bytes);
  const bool found = shared_owns(reinterpret_cast<uintptr_t>(at));
  allocator.raw_deallocate(at);
  return found;
}

py::object usage_of_shared() {
  return parsed(shared_usage());
}

}  // namespace

void bind_shared(py::module_& module) {
  const auto def = [&](const char* name, auto function, const auto&... arguments) {
    module.def(name, torch::wrap_pybind_function(function), arguments...);
  };
  def("_shared_tensor", &make_shared_tensor, "sizes"_a, "strides"_a, "dtype"_a);
  def("_is_shared", &is_shared, "tensor"_a);
  def("_share_allocations", &share_allocations, "everywhere"_a);
  def("_share_on_this_thread", &share_on_this_thread, "blocks"_a);
  def("_share_raw", &share_raw, "bytes"_a);
  def("_shared_usage", &usage_of_shared);
}

}  // namespace sagellm
