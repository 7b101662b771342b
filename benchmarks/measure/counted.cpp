// A library for LD_PRELOAD. Counts the allocations of one thread, and the string streams that it creates, between two
// calls from Python. Calls from excluded address ranges, here those of simulators, do not count.
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>

#include <new>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);
}

namespace {

struct Range {
  uintptr_t from, to;
};
Range left_out[64];
int ranges = 0;
// Not on the heap, because counting must not allocate.
__thread int counting = 0;
__thread int64_t allocations = 0;
__thread int64_t streams = 0;

void note(void* caller) {
  if (!counting) return;
  const auto at = reinterpret_cast<uintptr_t>(caller);
  for (int i = 0; i < ranges; ++i) {
    if (at >= left_out[i].from && at < left_out[i].to) return;
  }
  ++allocations;
}

}  // namespace

extern "C" {

void counted_leave_out(uintptr_t from, uintptr_t to) {
  if (ranges < 64) left_out[ranges++] = {from, to};
}
void counted_begin() {
  allocations = streams = 0;
  counting = 1;
}
void counted_end(int64_t* found) {
  counting = 0;
  found[0] = allocations;
  found[1] = streams;
}

void* malloc(size_t bytes) {
  note(__builtin_return_address(0));
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  note(__builtin_return_address(0));
  return __libc_calloc(count, bytes);
}
void* realloc(void* memory, size_t bytes) {
  note(__builtin_return_address(0));
  return __libc_realloc(memory, bytes);
}
int posix_memalign(void** out, size_t alignment, size_t bytes) {
  note(__builtin_return_address(0));
  *out = __libc_memalign(alignment, bytes);
  return *out == nullptr ? ENOMEM : 0;
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  note(__builtin_return_address(0));
  return __libc_memalign(alignment, bytes);
}

// std::ostringstream::ostringstream(): each call of c10::str creates one such stream.
void _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev(void* self) {
  using Constructor = void (*)(void*);
  static const auto next = reinterpret_cast<Constructor>(
      dlsym(RTLD_NEXT, "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev"));
  if (counting) ++streams;
  next(self);
}
}

void* operator new(size_t bytes) {
  note(__builtin_return_address(0));
  void* memory = __libc_malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new[](size_t bytes) {
  note(__builtin_return_address(0));
  void* memory = __libc_malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept {
  __libc_free(memory);
}
void operator delete[](void* memory) noexcept {
  __libc_free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  __libc_free(memory);
}
void operator delete[](void* memory, size_t) noexcept {
  __libc_free(memory);
}
