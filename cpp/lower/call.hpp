// The description of one call of c10d as its caller made it: the operation and its tensors. Every override of
// c10d::Backend makes a description (c10d/collectives.cpp). The engine path passes the description to `lower`, which
// makes the core's requests of it; a delegate is called with the same arguments. A description refers to the caller's
// arguments and lives on the stack.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "compat.hpp"
#include "lower/plan.hpp"

namespace sagellm {

// How an argument is divided into the blocks of the ranks.
enum class Blocks : uint8_t {
  kOwn,      // each tensor is one block
  kPerRank,  // a list has one tensor, or one list of tensors, for each rank
  kEqual,    // each tensor holds equal blocks, one for each rank
  kSplits,   // the tensor holds blocks that lists of split sizes describe
};

// An argument of a c10d call: a tensor, a list of tensors, or a list of lists.
class Operand {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using View = c10::ArrayRef<at::Tensor>;

  // No argument.
  Operand() = default;
  Operand(at::Tensor& tensor, Role role, Blocks blocks = Blocks::kOwn)
      : role(role), blocks(blocks), form_(Form::kTensor), argument_(&tensor), first_(tensor) {}
  Operand(Tensors& list, Role role, Blocks blocks = Blocks::kOwn)
      : role(role), blocks(blocks), form_(Form::kList), argument_(&list), first_(list) {}
  Operand(Lists& lists, Role role, Blocks blocks = Blocks::kOwn)
      : role(role), blocks(blocks), form_(Form::kLists), argument_(&lists) {
    if (!lists.empty()) first_ = lists[0];
  }

  bool present() const { return form_ != Form::kNone; }
  bool is_list() const { return form_ == Form::kList; }
  bool is_lists() const { return form_ == Form::kLists; }
  at::Tensor& tensor() const { return *static_cast<at::Tensor*>(argument_); }
  Tensors& list() const { return *static_cast<Tensors*>(argument_); }
  Lists& lists() const { return *static_cast<Lists*>(argument_); }

  // The argument in the type that c10d passed, for calling a delegate.
  operator at::Tensor&() const { return tensor(); }
  operator Tensors&() const { return list(); }
  operator Lists&() const { return lists(); }

  // The parts of the argument: a tensor or a list is one part; of a list of lists, each list is one part.
  size_t parts() const { return C10_UNLIKELY(is_lists()) ? lists().size() : present() ? 1 : 0; }
  View part(size_t i) const { return C10_UNLIKELY(is_lists()) ? View(lists()[i]) : first_; }
  // The first part, or an empty view.
  View first() const { return first_; }
  Tensors flat() const;

  template <class Each>
  void for_each(const Each& each) const {
    for (size_t i = 0; i < parts(); ++i) {
      for (const at::Tensor& tensor : part(i)) each(tensor);
    }
  }

  Role role = Role::kRead;
  Blocks blocks = Blocks::kOwn;
  // For an all_to_all or a message: the indices of the tensor's rows that are moved, in this order (checked by
  // `check::rows`). Null: all rows.
  const at::Tensor* rows = nullptr;

 private:
  enum class Form : uint8_t { kNone, kTensor, kList, kLists };
  Form form_ = Form::kNone;
  void* argument_ = nullptr;
  View first_;
};

struct CallDesc {
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  // Issues the same call on another backend, with the tensors of the given description.
  using Delegate = c10::function_ref<WorkPtr(c10d::Backend&, const CallDesc&)>;

  template <class Options>
  CallDesc(const char* op, Kind kind, Label label, const Options& options, const c10d::ReduceOp* reduce_op = nullptr)
      : op(op), kind(kind), label(label), reduce_op(reduce_op), timeout(options.timeout), async(options.asyncOp) {}
  // A message to or from `peer`.
  CallDesc(const char* op, Kind kind, Label label, int64_t peer, int tag)
      : op(op), kind(kind), label(label), root(peer), tag(tag), timeout(c10d::kUnsetTimeout), async(true) {}

  bool is_message() const { return kind == Kind::kSend || kind == Kind::kRecv; }
  bool has_root() const {
    return kind == Kind::kBroadcast || kind == Kind::kReduce || kind == Kind::kGather || kind == Kind::kScatter;
  }
  bool names_rows() const { return inputs.rows != nullptr || outputs.rows != nullptr; }
  // True if the call has only one argument. That argument is `outputs`, even if the call only reads it.
  bool has_one_argument() const { return !inputs.present(); }
  // True for the all-reduce of one sparse tensor, which is carried out as several operations.
  bool is_sparse_all_reduce() const {
    return kind == Kind::kAllReduce && !coalesced && outputs.list().size() == 1 && outputs.list()[0].defined() &&
           outputs.list()[0].is_sparse();
  }
  // True if some tensor is not in the CPU's memory.
  bool on_device() const {
    bool found = false;
    const auto look = [&](const at::Tensor& tensor) { found = found || (tensor.defined() && !tensor.is_cpu()); };
    inputs.for_each(look);
    outputs.for_each(look);
    return found;
  }
  // The tensors that the profiler shows as the call's inputs.
  c10::ArrayRef<at::Tensor> traced() const { return has_one_argument() ? outputs.first() : inputs.first(); }

  // torch's name of the call, for error texts.
  const char* op;
  Kind kind;
  Label label;
  Operand inputs;
  Operand outputs;
  // True for a coalesced call: element i of every list belongs to the i-th of several calls. A coalesced message is one
  // message with the bytes of all tensors of its list.
  bool coalesced = false;
  // Null for calls that do not combine numbers.
  const c10d::ReduceOp* reduce_op = nullptr;
  // The root; for a message the peer, which may be kAnyRank.
  int64_t root = 0;
  int64_t root_tensor = 0;
  int tag = 0;
  const std::vector<int64_t>* input_splits = nullptr;
  const std::vector<int64_t>* output_splits = nullptr;
  std::chrono::milliseconds timeout;
  bool async;
  // For a barrier: the device whose current stream it waits for.
  std::optional<c10::Device> device;
  // Refers to objects on the stack of the override.
  Delegate delegate;
};

// A copy of a call in which `replace` has replaced each defined tensor.
class Replaced {
 public:
  using Replace = std::function<at::Tensor(const at::Tensor&, Role)>;
  Replaced(const CallDesc& original, const Replace& replace);
  Replaced(const Replaced&) = delete;
  Replaced& operator=(const Replaced&) = delete;

  const CallDesc& call() const { return call_; }

 private:
  static Operand copied(const Operand& original, const Replace& replace, Operand::Lists& to);

  CallDesc call_;
  // The lists to which the arguments of `call_` refer.
  Operand::Lists inputs_;
  Operand::Lists outputs_;
};

// The properties of the engine or library that carries a call, as far as the checks depend on them.
struct Carrier {
  int rank;
  int size;
  // The device of the caller's tensors.
  c10::Device device;
  // A vendor's library carries the call. Some such libraries can also combine 8-bit floats.
  bool vendor = false;
  // The call is part of a batch of messages on a device, in which this rank may send to itself.
  bool to_itself = false;
  // Several tensors in an all_reduce, broadcast or all_gather have gloo's meaning (lower/gloo_lists.cpp).
  bool gloo_lists = false;
};

using Plans = c10::SmallVector<Plan, 1>;

// Checks the call against c10d's rules and makes the core's requests for it. It makes one request, except for a list
// whose tensors cannot all be combined by one operation.
Plans lower(const CallDesc& call, const Carrier& carrier);

// Returns the record with which the statistics count a call that the core does not carry.
ExternalOp external_op(const CallDesc& call, bool host_staged);

}  // namespace sagellm
