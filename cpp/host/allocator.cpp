#include "host/allocator.hpp"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "host/host.hpp"
#include "sagellm/src/ffi/memory.rs.h"

namespace sagellm {

namespace {

// Depth of the nested scopes in which this thread's allocations are shared.
thread_local int shared_blocks = 0;

// True if the allocations of all threads are shared. The thread that makes the first group sets it, once. Every thread
// that allocates reads it (relaxed: it orders no other memory access).
std::atomic<bool> shared_everywhere{false};

// Reports the release as torch's own allocator does, so that torch's memory profiler sees one kind of CPU memory.
void free_reported(void* at) {
  if (at == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(at);
  shared_free(reinterpret_cast<uintptr_t>(at));
}

// Logs one line in each process, the first time that shared memory exists but has no room for an allocation. If a
// process has no shared memory at all, the core logs the reason; a forked child has none by design.
void tell_refusal(size_t bytes) {
  static std::atomic<bool> told{false};
  if (told.load(std::memory_order_relaxed)) return;
  const SharedRoom room = shared_room();
  if (room.limit == 0 || told.exchange(true, std::memory_order_relaxed)) return;
  log_line(2, "a tensor of " + std::to_string(bytes) + " bytes is ordinary memory, which peers cannot reach: of " +
                  std::to_string(room.limit) + " bytes " + std::to_string(room.used) +
                  " are in use. Free tensors, or raise SAGELLM_SHARED_BYTES; this is said once");
}

// Allocates memory that peers can reach. Returns an empty pointer if there is none.
at::DataPtr reachable_memory(size_t bytes) {
  void* const at = reinterpret_cast<void*>(shared_allocate(bytes));
  if (at == nullptr) {
    tell_refusal(bytes);
    return {};
  }
  at::DataPtr memory{at, at, &free_reported, at::Device(at::kCPU)};
  c10::profiledCPUMemoryReporter().New(at, bytes);
  return memory;
}

// Makes large allocations in shared memory. The allocator that was installed before makes all other allocations. Never
// destroyed, because storages keep a pointer to their allocator.
class Forwarding final : public c10::Allocator {
 public:
  explicit Forwarding(c10::Allocator* behind) : behind_(behind) {}

  at::DataPtr allocate(size_t bytes) override {
    if (bytes >= kSmallestShared && (shared_blocks > 0 || shared_everywhere.load(std::memory_order_relaxed))) {
      at::DataPtr memory = reachable_memory(bytes);
      if (memory) return memory;
    }
    return behind_->allocate(bytes);
  }

  bool is_simple_data_ptr(const at::DataPtr& memory) const override {
    return memory.get_deleter() == &free_reported ? memory.get() == memory.get_context()
                                                  : behind_->is_simple_data_ptr(memory);
  }

  // Deleter for callers that keep addresses without their deleters.
  at::DeleterFnPtr raw_deleter() const override;

  void copy_data(void* to, const void* from, size_t bytes) const override { behind_->copy_data(to, from, bytes); }

  c10::Allocator* behind() const { return behind_; }

 private:
  c10::Allocator* const behind_;
};

// The only instance, because a raw deleter gets no object. Written once, under the lock of `share_allocations`
// (release), read by any thread (acquire).
std::atomic<Forwarding*> forwarding{nullptr};

// The allocator of ordinary memory.
c10::Allocator& ordinary() {
  const Forwarding* const ours = forwarding.load(std::memory_order_acquire);
  return ours != nullptr ? *ours->behind() : *c10::GetCPUAllocator();
}

void free_by_owner(void* at) {
  if (at == nullptr) return;
  if (shared_owns(reinterpret_cast<uintptr_t>(at))) {
    free_reported(at);
  } else {
    ordinary().raw_deallocate(at);
  }
}

at::DeleterFnPtr Forwarding::raw_deleter() const {
  return behind_->raw_deleter() == nullptr ? nullptr : &free_by_owner;
}

// Allocator for tensors that were asked for one by one, of any size.
class Reachable final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    if (bytes > 0) {
      at::DataPtr memory = reachable_memory(bytes);
      if (memory) return memory;
    }
    return ordinary().allocate(bytes);
  }
  at::DeleterFnPtr raw_deleter() const override {
    return ordinary().raw_deleter() == nullptr ? nullptr : &free_by_owner;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

at::Tensor shared_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  static auto* const allocator = new Reachable;
  constexpr c10::DispatchKeySet on_cpu(c10::DispatchKey::CPU);
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides, allocator, on_cpu, type));
}

bool is_shared(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.layout() != at::kStrided) return false;
  // Does not call `data()`, because its checks throw for a tensor without data, such as a FakeTensor.
  const void* const at = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  return at != nullptr && shared_reaches(reinterpret_cast<uintptr_t>(at));
}

void share_allocations(bool everywhere) {
  static std::mutex mutex;
  static bool told = false;
  const std::lock_guard<std::mutex> lock(mutex);
  Forwarding* ours = forwarding.load(std::memory_order_relaxed);
  if (ours == nullptr) {
    ours = new Forwarding(c10::GetCPUAllocator());
    forwarding.store(ours, std::memory_order_release);
    // torch keeps its allocator if that has a higher priority than the new one, so try all priorities. torch stores one
    // address, so a thread that allocates meanwhile uses one allocator or the other.
    for (int priority = 0; c10::GetCPUAllocator() != ours && priority <= std::numeric_limits<uint8_t>::max();
         ++priority) {
      c10::SetCPUAllocator(ours, static_cast<uint8_t>(priority));
    }
  }
  if (c10::GetCPUAllocator() != ours && !told) {
    told = true;
    log_line(2,
             "another package has replaced torch's CPU allocator after this one did: shared_tensors() and "
             "SAGELLM_SHARED_TENSORS have no effect. Enter shared_tensors() once before that package is used");
  }
  if (everywhere) shared_everywhere.store(true, std::memory_order_relaxed);
}

void share_on_this_thread(int blocks) {
  shared_blocks += blocks;
}

}  // namespace sagellm
