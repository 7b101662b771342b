// Tensors in memory that peers can reach (src/engine/shm/memory/arena.rs). They are made one by one, or by torch's CPU
// allocator after ours was installed in front of it.
//
// Each allocation carries the deleter of the allocator that made it, so it is freed by that allocator whatever is
// installed later. If the core has no such memory, the allocation is ordinary memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace sagellm {

// Smaller allocations of torch stay ordinary memory: an allocation of ours takes whole pages, and small operations of
// ours gain nothing from shared memory.
constexpr size_t kSmallestShared = size_t{16} * 1024;

// An uninitialized tensor on the CPU. If `resize_` enlarges it, the new memory comes from the same allocator.
at::Tensor shared_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type);

// True if the tensor is in such memory and peers can reach it now.
bool is_shared(const at::Tensor& tensor);

// From now on torch's CPU allocations are made in such memory, on threads that ask for it or, if `everywhere`, on all
// threads. The first call installs our allocator in front of torch's, for ever.
void share_allocations(bool everywhere);

// Changes the number of nested blocks in which this thread asks for such memory.
void share_on_this_thread(int blocks);

}  // namespace sagellm
