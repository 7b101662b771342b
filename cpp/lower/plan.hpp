// One call on its way to the core, with its tensors as contiguous pieces of memory. A contiguous tensor is passed by
// pointer; a temporary replaces any other tensor. The table in `src/types.rs` lists the pieces of each kind of call.
//
// Elements are passed in their logical order, because no rank knows the strides of the other ranks' tensors.
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

// `types::ANY_RANK` of the core.
constexpr uint32_t kAnyRank = UINT32_MAX;
// `types::CallNote::NO_TYPE` of the core.
constexpr uint8_t kNoType = UINT8_MAX;

// A temporary and the tensor that it replaces: a strided, conjugated or negated tensor, or a tensor on a device.
struct Staged {
  at::Tensor temporary;
  at::Tensor tensor;
};

// Copies without autograd. May be called on any thread.
void copy_no_grad(const at::Tensor& to, const at::Tensor& from);
// Copies the tensors into their temporaries or, if `back`, the temporaries into their tensors.
void copy_staged(const std::vector<Staged>& list, bool back);

// True if the two have a byte in common. A strided tensor counts as all memory from its first to its last byte.
bool overlap(const at::Tensor& left, const at::Tensor& right);
bool overlap(const Piece& left, const Piece& right);
// For each tensor of a list: whether it overlaps another tensor of the list.
std::vector<bool> in_overlaps(c10::ArrayRef<at::Tensor> tensors);
// The address range from the tensor's first byte to its last, both included, on the tensor's device.
Piece extent(const at::Tensor& tensor);

// The bytes of a strided tensor as runs, or as one range from first to last byte if its layout has too many dimensions.
Strided runs_of(const at::Tensor& tensor, bool written);
// True if one of the two lists writes a byte that the other list reads or writes.
bool conflict(const std::vector<Strided>& one, const std::vector<Strided>& other);
Piece extent(const Strided& runs);

// How a call is named: by its title in the profiler ("sagellm:" and the op), and by its value in c10d's enumeration.
struct Label {
  const char* title;
  c10d::OpType type;
};

// Returns the indices of the first two tensors of a list that have a byte in common, except pairs for which `allowed`
// returns true. If the address ranges of two strided tensors overlap, their bytes may still be apart, as those of two
// columns of a matrix are. If both tensors have the same layout, the strides tell whether the bytes are apart. Other
// tensors are compared byte by byte, which is slow and rare. Sparse tensors count as sharing no memory.
using Places = std::pair<size_t, size_t>;
std::optional<Places> shared(c10::ArrayRef<at::Tensor> tensors, const std::function<bool(Places)>& allowed = {});

// How a call uses the tensors of an argument.
enum class Role : uint8_t { kRead, kWrite, kUpdate };

// Sizes of the ranks' blocks in bytes. Empty if all are equal, unless `always`.
std::vector<size_t> block_sizes(c10::ArrayRef<at::Tensor> blocks, bool always);

class Plan {
 public:
  // `op` is torch's name of the call, for error texts. `by_vendor`: the tensors are on a device whose vendor's library
  // carries the call. Then temporaries are on that device, too, and making the plan reads no device tensor. Otherwise
  // temporaries are in host memory, and every tensor on a device gets a temporary.
  Plan(const char* op, Kind kind, std::chrono::milliseconds timeout, bool by_vendor = false);

  // Makes this a reduction by `reduce_op` of numbers of the type of `tensor`.
  void combine(const at::Tensor& tensor, const c10d::ReduceOp& reduce_op);

  // Append a tensor to the inputs, to the outputs, or to both as the same memory. `stage` forces a temporary, even for
  // a contiguous tensor. Set it if the tensor overlaps another piece in a way that the core forbids.
  void read(const at::Tensor& tensor, bool stage = false);
  void write(const at::Tensor& tensor, bool stage = false);
  // Appends the tensors of a list to the outputs. If tensors share memory, their results are stored one after the other
  // at the end, in list order.
  void write_all(c10::ArrayRef<at::Tensor> tensors);
  void update(const at::Tensor& tensor, bool stage = false);
  void add(const at::Tensor& tensor, Role role);

  // Append rows of a contiguous tensor, in the order of their indices (checked by `check::rows`). Rows that follow each
  // other in memory become one piece.
  void read_rows(const at::Tensor& tensor, const at::Tensor& rows);
  void write_rows(const at::Tensor& tensor, const at::Tensor& rows);

  // Joins pieces that follow each other in memory, such as slices of one buffer, into one piece.
  void join_neighbours();
  // Append coalesced lists, whose pieces interleave: the blocks of the first rank from all tensors, then those of the
  // second rank, and so on. Each tensor is cut into as many equal blocks as there are ranks.
  void read_blocks(c10::ArrayRef<at::Tensor> tensors, size_t ranks);
  void write_blocks(c10::ArrayRef<at::Tensor> tensors, size_t ranks);

  // Records the tensors of a list that is moved, not combined.
  void note_list(c10::ArrayRef<at::Tensor> tensors);

  // Marks this as an internal operation or a part of a call, which the statistics do not count as a call.
  void uncounted() {
    call.note.counts = false;
    call.note.tensors = 0;
  }

  // Records memory that the operation reads or writes besides its pieces.
  void touch(const at::Tensor& tensor, bool written) { touched_.push_back(runs_of(tensor, written)); }

  c10::ArrayRef<Piece> inputs() const { return inputs_; }
  c10::ArrayRef<Piece> outputs() const { return outputs_; }
  // Memory that the operation reads or writes besides its pieces. Operations that touch the same memory keep their
  // order.
  c10::ArrayRef<Strided> touched() const { return touched_; }

  // The request for the core. It refers to the lists of this plan.
  Request request() const;
  rust::Box<RustOp> issue(const RustGroup& group, std::shared_ptr<Completion> completion) const;
  void run(const RustGroup& group, std::shared_ptr<Completion> completion) const;

  const char* op;
  Call call;
  // The results of `block_sizes`; empty if all blocks are equal.
  std::vector<size_t> in_blocks;
  std::vector<size_t> out_blocks;
  // Dtype and size of each tensor in the call's list, if there are several: `types::Request::list` of the core.
  std::vector<Listed> list;
  // `before`: tensors that are copied into temporaries before the operation runs. `after`: tensors that are copied back
  // from temporaries.
  std::vector<Staged> before;
  std::vector<Staged> after;
  // Called by `Pending::copy` before it fills the temporaries; empty for nearly all calls.
  std::function<void()> prepare;
  // The stream on which `Pending::copy` copies, if the tensors are on a device and the temporaries are in host memory.
  std::optional<c10::Stream> copies_on;
  // The factor of PREMUL_SUM if it is on a device, as a tensor without dimensions. Otherwise `call` holds the factor.
  at::Tensor factor;

 private:
  using Pieces = c10::SmallVector<Piece, 4>;

  // True if the core, or the vendor's library, can use the memory of `tensor` as it is.
  bool is_direct(const at::Tensor& tensor) const;
  // Makes a temporary for `tensor`. Unless a vendor's library carries the call, records the memory as read or
  // `written`.
  at::Tensor temporary_for(const at::Tensor& tensor, bool written);
  // Return the address of contiguous elements that the core can read or write: those of `tensor` itself or of its
  // temporary.
  char* readable(const at::Tensor& tensor, bool stage);
  char* writable(const at::Tensor& tensor, bool stage);
  // Appends the blocks of `tensors` rank by rank. `bases` has the address of each tensor's first byte.
  static void add_blocks(Pieces& pieces, c10::ArrayRef<at::Tensor> tensors, const std::vector<char*>& bases,
                         size_t ranks);
  void add_rows(Pieces& pieces, const char* base, const at::Tensor& tensor, const at::Tensor& rows);

  bool by_vendor_;
  Pieces inputs_;
  Pieces outputs_;
  std::vector<Strided> touched_;
};

}  // namespace sagellm
