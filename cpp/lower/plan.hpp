// One call on its way to the core: tensors become contiguous pieces of memory, by pointer where they are contiguous,
// through temporaries where they are not. The table in `src/types.rs` says which pieces each kind of call has.
//
// Elements are passed in their logical order, because no rank knows the strides of the others.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "compat.hpp"
#include "host/host.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

// `types::ANY_RANK`.
constexpr uint32_t kAnyRank = UINT32_MAX;
// `types::CallNote::NO_TYPE`.
constexpr uint8_t kNoType = UINT8_MAX;

// A temporary and the tensor it stands for: one that is strided, conjugate or negated, or lies on a device.
struct Staged {
  at::Tensor temporary;
  at::Tensor tensor;
};

// Copies without autograd, on any thread.
void copy_no_grad(const at::Tensor& to, const at::Tensor& from);
// Copies into the temporaries, or, `back`, out of them.
void copy_staged(const std::vector<Staged>& list, bool back);

// True when some byte belongs to both. Judges strided tensors by the memory between their first and last byte.
bool overlap(const at::Tensor& left, const at::Tensor& right);
bool overlap(const Piece& left, const Piece& right);
// For each tensor of a list whether it overlaps another one.
std::vector<bool> in_overlaps(c10::ArrayRef<at::Tensor> tensors);
// The range of addresses, on the tensor's device, from its first byte to its last, both included.
Piece extent(const at::Tensor& tensor);

// The bytes of a strided tensor; from the first to the last where its layout has too many dimensions.
Strided runs_of(const at::Tensor& tensor, bool written);
// True when one of the two lists writes a byte that the other reads or writes.
bool conflict(const std::vector<Strided>& one, const std::vector<Strided>& other);
Piece extent(const Strided& runs);

// The names of a call elsewhere: in the profiler ("sagellm:" and the op) and in c10d's enumeration.
struct Label {
  const char* title;
  c10d::OpType type;
};

// The indices of the first two tensors of a list that have a byte in common, except for pairs that are `allowed` to.
// The memory of strided tensors, such as columns of a matrix, may interleave; then their runs are compared, which is
// slow and rare. Sparse tensors count as sharing no memory.
using Places = std::pair<size_t, size_t>;
std::optional<Places> shared(c10::ArrayRef<at::Tensor> tensors, const std::function<bool(Places)>& allowed = {});

// What a call does with the tensors of an argument.
enum class Role : uint8_t { kRead, kWrite, kUpdate };

// The sizes of the ranks' blocks in bytes; none where all are equal, unless they are wanted `always`.
std::vector<size_t> block_sizes(c10::ArrayRef<at::Tensor> blocks, bool always);

class Plan {
 public:
  // `op` is torch's name of the call, for messages. `by_vendor`: its tensors are on a device whose vendor's library
  // carries the call, so temporaries are on that device too, and no tensor is read now. Otherwise temporaries are in
  // host memory, and every tensor on a device gets one.
  Plan(const char* op, Kind kind, std::chrono::milliseconds timeout, bool by_vendor = false);

  // Makes it a call that combines numbers of the type of `tensor`.
  void combine(const at::Tensor& tensor, const c10d::ReduceOp& reduce_op);

  // Appends a tensor to the inputs, to the outputs, or to both as the same memory. `stage` asks for a temporary even
  // where the tensor is contiguous, because it overlaps another piece in a way that the core does not allow.
  void read(const at::Tensor& tensor, bool stage = false);
  void write(const at::Tensor& tensor, bool stage = false);
  // Appends the tensors of a list to the outputs. Tensors that share memory are stored at the end one after the other,
  // in the order of the list.
  void write_all(c10::ArrayRef<at::Tensor> tensors);
  void update(const at::Tensor& tensor, bool stage = false);
  void add(const at::Tensor& tensor, Role role);

  // For coalesced lists, whose pieces interleave: all of the first rank's blocks, then all of the second's, and so on.
  // Every tensor is cut into as many equal blocks as there are ranks.
  void read_blocks(c10::ArrayRef<at::Tensor> tensors, size_t ranks);
  void write_blocks(c10::ArrayRef<at::Tensor> tensors, size_t ranks);

  // Notes the tensors of a list that are moved, not combined.
  void note_list(c10::ArrayRef<at::Tensor> tensors);

  // Marks it as an internal operation, or a part of a call: the statistics do not count it as a call.
  void uncounted() {
    call.counts = false;
    call.tensors = 0;
  }

  // Notes memory that the operation reads or writes besides its pieces.
  void touch(const at::Tensor& tensor, bool written) { touched_.push_back(runs_of(tensor, written)); }

  c10::ArrayRef<Piece> inputs() const { return inputs_; }
  c10::ArrayRef<Piece> outputs() const { return outputs_; }
  // Memory that the operation reads or writes besides its pieces; operations that touch it keep their order.
  c10::ArrayRef<Strided> touched() const { return touched_; }

  // For the core; it refers to the lists of this plan.
  Request request() const;
  rust::Box<RustOp> issue(const RustGroup& group, std::shared_ptr<Completion> completion) const;
  void run(const RustGroup& group, std::shared_ptr<Completion> completion) const;

  const char* op;
  Call call;
  // `block_sizes`.
  std::vector<size_t> in_blocks;
  std::vector<size_t> out_blocks;
  // The tensors of the call's list, where it has several: `types::Request::list`.
  std::vector<Listed> list;
  // The tensors that `Pending::copy` copies into temporaries, and the tensors that it copies back from temporaries.
  std::vector<Staged> before;
  std::vector<Staged> after;
  // What `Pending::copy` does before it fills the temporaries; empty in nearly all calls.
  std::function<void()> prepare;
  // The stream on which `Pending::copy` copies, where the tensors are on a device and the temporaries are not.
  std::optional<c10::Stream> copies_on;
  // The factor of PREMUL_SUM where it lies on a device, without dimensions; else `call` has it.
  at::Tensor factor;

 private:
  using Pieces = c10::SmallVector<Piece, 4>;

  // True where the core, or the vendor's library, can use the memory of `tensor` as it is.
  bool is_direct(const at::Tensor& tensor) const;
  // A temporary for `tensor`; the memory behind it is noted as read or `written`.
  at::Tensor temporary_for(const at::Tensor& tensor, bool written);
  // First byte of the contiguous elements of `tensor`, read or written.
  char* readable(const at::Tensor& tensor, bool stage);
  char* writable(const at::Tensor& tensor, bool stage);
  // Rank by rank the blocks of `tensors`, whose first bytes are `bases`.
  static void add_blocks(Pieces& pieces, c10::ArrayRef<at::Tensor> tensors, const std::vector<char*>& bases,
                         size_t ranks);

  bool by_vendor_;
  Pieces inputs_;
  Pieces outputs_;
  std::vector<Strided> touched_;
};

}  // namespace sagellm
