// All conditions on the version of torch or Python are in this file, so that the rest of `cpp/` needs none.
//
// torch 2.11 is compiled as C++17, later versions as C++20. So nothing newer than C++17 may be used anywhere in `cpp/`.
#pragma once

#include <ATen/Context.h>
#include <torch/csrc/python_headers.h>
#include <torch/version.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#define SAGELLM_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// torch 2.14 added the abort hooks with this macro. It also added `all_gather_single` and its siblings,
// `gather_into_tensor`, `Options::clone` and `Work::getTimeout`, which have no macros of their own.
#ifdef C10D_BACKEND_HAS_HOOKS
#define SAGELLM_HAS_ABORT_HOOKS 1
#define SAGELLM_HAS_SINGLE_NAMES 1
#define SAGELLM_HAS_OPTIONS_CLONE 1
#define SAGELLM_HAS_WORK_TIMEOUT 1
#endif

// torch 2.15 added completion hooks with their keys, and functions that tell whether a backend supports either kind of
// hook. It also added ephemeral timeouts and time estimation for all backends; older versions have these for nccl
// alone.
#if SAGELLM_TORCH_AT_LEAST(2, 15)
#define SAGELLM_HAS_COMPLETION_HOOKS 1
#define SAGELLM_HAS_EPHEMERAL_TIMEOUT 1
#define SAGELLM_HAS_TIME_ESTIMATION 1
#endif

namespace sagellm {

// The types of the hooks. They exist under torch versions that cannot register hooks, too, so that the code which calls
// the hooks needs no condition.
#ifdef SAGELLM_HAS_ABORT_HOOKS
using AbortHook = c10d::AbortHook;
#else
using AbortHook = std::function<void()>;
#endif
#ifdef SAGELLM_HAS_COMPLETION_HOOKS
using CompletionHook = c10d::CompletionHook;
using CompletionHookArgs = c10d::CompletionHookArgs;
#else
struct CompletionHookArgs {
  uint64_t completionKey = 0;
  std::optional<float> duration_ms;
};
using CompletionHook = std::function<void(const CompletionHookArgs&)>;
#endif

// A store's description of itself; empty in torch versions in which stores have none.
template <class AnyStore>
auto store_text(const AnyStore& store, int) -> decltype(store.repr()) {
  return store.repr();
}
template <class AnyStore>
std::string store_text(const AnyStore&, long) {
  return {};
}

// Newer torch versions added two values to c10d's enumeration. In versions that lack such a value, COALESCED replaces
// it, which torch's own backends use there.
template <class Type>
constexpr auto gather_coalesced_type(int) -> decltype(Type::ALLGATHER_INTO_TENSOR_COALESCED) {
  return Type::ALLGATHER_INTO_TENSOR_COALESCED;
}
template <class Type>
constexpr Type gather_coalesced_type(long) {
  return Type::COALESCED;
}
template <class Type>
constexpr auto reduce_scatter_coalesced_type(int) -> decltype(Type::REDUCE_SCATTER_TENSOR_COALESCED) {
  return Type::REDUCE_SCATTER_TENSOR_COALESCED;
}
template <class Type>
constexpr Type reduce_scatter_coalesced_type(long) {
  return Type::COALESCED;
}
constexpr c10d::OpType kGatherCoalesced = gather_coalesced_type<c10d::OpType>(0);
constexpr c10d::OpType kReduceScatterCoalesced = reduce_scatter_coalesced_type<c10d::OpType>(0);

// Whether a stream is being captured into a graph. No value in older versions, whose device guards cannot tell.
template <class Guard, class Stream>
auto guard_is_capturing(const Guard& guard, const Stream& stream, int)
    -> std::optional<decltype(guard.isStreamCapturing(stream))> {
  return guard.isStreamCapturing(stream);
}
template <class Guard, class Stream>
std::optional<bool> guard_is_capturing(const Guard& guard, const Stream& stream, long) {
  return std::nullopt;
}

// torch_npu has an operator that returns the format of a tensor's memory, as a number of ACL's enumeration. In these
// formats (undefined, NCHW, NHWC, ND, NDHWC, NCDHW) the memory holds the elements in order; in all others it does not.
constexpr const char* kFormatOperator = "npu::get_npu_format";
constexpr int64_t kPlainFormats[] = {-1, 0, 1, 2, 27, 30};

// False for a device that this machine cannot have. torch's fake tensors install a guard that reports one CUDA device
// on a machine without any.
inline bool can_exist(const c10::Device& device) {
  return !device.is_cuda() || at::hasCUDA();
}

// torch 2.15 has a second name for this class, and keeps this older one as an alias.
using PremulSupplement = c10d::NCCLPreMulSumSupplement;

// False before the interpreter is initialized and after it has begun to shut down. Then no thread may ask for the GIL.
inline bool python_alive() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0;
#else
  return Py_IsInitialized() != 0 && _Py_IsFinalizing() == 0;
#endif
}

}  // namespace sagellm
