// Tensors in memory that peers can reach (src/engine/shm/memory/arena.rs). They are made one by one, or by our CPU
// allocator, which is installed in front of torch's own.
//
// Each allocation carries the deleter of the allocator that made it, so it is freed by that allocator whatever is
// installed later. If the core has no such memory, the allocation is ordinary memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace sagellm {

// Smallest allocation of torch that is made in shared memory, in bytes. Smaller ones stay ordinary memory, because a
// shared allocation takes whole pages, and small operations do not become faster by shared memory.
constexpr size_t kSmallestShared = size_t{16} * 1024;

// Returns an uninitialized CPU tensor in shared memory. If `resize_` enlarges it, the new memory is also shared.
at::Tensor shared_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type);

// True if the tensor is in shared memory and peers can reach it now.
bool is_shared(const at::Tensor& tensor);

// From now on torch's large CPU allocations are made in shared memory: on threads that ask for it or, if `everywhere`,
// on all threads. The first call installs this allocator in front of torch's. It is never removed.
void share_allocations(bool everywhere);

// Changes the number of nested blocks in which this thread asks for shared memory.
void share_on_this_thread(int blocks);

}  // namespace sagellm
