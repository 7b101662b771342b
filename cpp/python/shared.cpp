#include "python/bindings.hpp"

#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <vector>

#include "host/allocator.hpp"
#include "sagellm/src/ffi/memory.rs.h"

namespace sagellm {

namespace {

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
  define(module, "_shared_tensor", &make_shared_tensor, "sizes"_a, "strides"_a, "dtype"_a);
  define(module, "_is_shared", &is_shared, "tensor"_a);
  define(module, "_share_allocations", &share_allocations, "everywhere"_a);
  define(module, "_share_on_this_thread", &share_on_this_thread, "blocks"_a);
  define(module, "_share_raw", &share_raw, "bytes"_a);
  define(module, "_shared_usage", &usage_of_shared);
}

}  // namespace sagellm
