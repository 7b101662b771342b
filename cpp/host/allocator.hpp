// Tensors in memory that peers can reach (src/engine/shm/memory/arena.rs): made one by one, or by torch's own CPU
// allocator, in front of which ours is put where a program asks for it.
//
// Every piece of memory carries the deleter of the allocator that gave it, so whatever is installed later, all memory
// goes back to where it came from. Where the core gives none, memory is ordinary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace sagellm {

// Smaller allocations of torch stay where they were: an allocation of ours is a multiple of a page, and small
// operations of ours need no such memory.
constexpr size_t kSmallestShared = size_t{16} * 1024;

// A tensor on the CPU, not set to anything. What `resize_` gives it later comes from the same memory.
at::Tensor shared_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type);

// Whether the tensor's memory is such memory, and peers can reach it now.
bool is_shared(const at::Tensor& tensor);

// From now on torch's CPU allocations are served from such memory on threads that ask for it; `everywhere` says that
// all threads do. The first call puts our allocator in front of torch's, for ever.
void share_allocations(bool everywhere);

// Adds to the number of blocks within which this thread asks for it.
void share_on_this_thread(int blocks);

}  // namespace sagellm
