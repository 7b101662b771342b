#include "lower/plan.hpp"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "host/errors.hpp"
#include "host/sites.hpp"
#include "host/slices.hpp"
#include "lower/checks.hpp"

namespace sagellm {

namespace {

const PremulSupplement& premul(const char* op, const c10d::ReduceOp& reduce_op) {
  const auto* supplement = dynamic_cast<const PremulSupplement*>(reduce_op.supplement_.get());
  if (supplement == nullptr) value_error(op, "PREMUL_SUM came without its factor");
  const at::Tensor& factor = supplement->tensor_factor;
  if (factor.defined() && factor.numel() != 1) {
    value_error(op, c10::str("the factor of PREMUL_SUM has ", factor.numel(), " elements, expected one"));
  }
  return *supplement;
}

}  // namespace

std::vector<size_t> block_sizes(c10::ArrayRef<at::Tensor> blocks, bool always) {
  const bool equal = std::all_of(blocks.begin(), blocks.end(),
                                 [&](const at::Tensor& block) { return block.nbytes() == blocks[0].nbytes(); });
  std::vector<size_t> sizes;
  if (equal && !always) return sizes;
  sizes.reserve(blocks.size());
  for (const at::Tensor& block : blocks) sizes.push_back(block.nbytes());
  return sizes;
}

void copy_no_grad(const at::Tensor& to, const at::Tensor& from) {
  // Threads of the core start with grad mode on, and a parameter that requires grad may be an output.
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  to.copy_(from);
}

void copy_staged(const std::vector<Staged>& list, bool back) {
  for (const Staged& each : list)
    copy_no_grad(back ? each.tensor : each.temporary, back ? each.temporary : each.tensor);
}

Piece extent(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  // Strides are never negative.
  size_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += static_cast<size_t>(tensor.size(dim) - 1) * static_cast<size_t>(tensor.stride(dim));
  }
  return {reinterpret_cast<size_t>(tensor.const_data_ptr()), (last + 1) * tensor.itemsize()};
}

Strided runs_of(const at::Tensor& tensor, bool written) {
  struct Dim {
    size_t count, stride;
  };
  c10::SmallVector<Dim, 8> dims;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    // All elements of an expanded dimension share one address.
    if (tensor.size(dim) == 1 || tensor.stride(dim) == 0) continue;
    dims.push_back(
        {static_cast<size_t>(tensor.size(dim)), static_cast<size_t>(tensor.stride(dim)) * tensor.itemsize()});
  }
  std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  Strided runs{reinterpret_cast<size_t>(tensor.const_data_ptr()), tensor.itemsize(), {1, 1, 1, 1}, {}, written};
  while (!dims.empty() && dims.back().stride == runs.run) {
    runs.run *= dims.back().count;
    dims.pop_back();
  }
  for (size_t i = dims.size(); i-- > 1;) {
    if (dims[i - 1].stride != dims[i].stride * dims[i].count) continue;
    dims[i - 1] = {dims[i - 1].count * dims[i].count, dims[i].stride};
    dims.erase(dims.begin() + static_cast<ptrdiff_t>(i));
  }
  if (dims.size() > runs.counts.size()) {
    runs.run = extent(tensor).bytes;
    return runs;
  }
  for (size_t i = 0; i < dims.size(); ++i) {
    runs.counts[i] = dims[i].count;
    runs.strides[i] = dims[i].stride;
  }
  return runs;
}

Piece extent(const Strided& runs) {
  size_t last = runs.run;
  for (size_t i = 0; i < runs.counts.size(); ++i) last += (runs.counts[i] - 1) * runs.strides[i];
  return {runs.addr, last};
}

bool overlap(const Piece& a, const Piece& b) {
  return a.bytes > 0 && b.bytes > 0 && a.addr < b.addr + b.bytes && b.addr < a.addr + a.bytes;
}

bool overlap(const at::Tensor& left, const at::Tensor& right) {
  return overlap(extent(left), extent(right));
}

namespace {

// Returns all pairs of tensors on the same device whose extents overlap, each as two indices in ascending order. Sparse
// tensors overlap nothing.
std::vector<Places> overlapping(c10::ArrayRef<at::Tensor> tensors) {
  struct Reach {
    size_t begin, end, place;
  };
  c10::SmallVector<Reach, 16> reaches;
  for (size_t place = 0; place < tensors.size(); ++place) {
    if (!tensors[place].defined() || tensors[place].layout() != at::kStrided) continue;
    const Piece piece = extent(tensors[place]);
    if (piece.bytes > 0) reaches.push_back({piece.addr, piece.addr + piece.bytes, place});
  }
  std::sort(reaches.begin(), reaches.end(), [](const Reach& a, const Reach& b) { return a.begin < b.begin; });
  std::vector<Places> pairs;
  for (size_t i = 0; i < reaches.size(); ++i) {
    for (size_t j = i + 1; j < reaches.size() && reaches[j].begin < reaches[i].end; ++j) {
      const auto [low, high] = std::minmax(reaches[i].place, reaches[j].place);
      // Tensors on different devices cannot overlap, because each device has its own address space.
      if (tensors[low].device() == tensors[high].device()) pairs.emplace_back(low, high);
    }
  }
  return pairs;
}

// True if each dimension's stride is at least as long as all inner dimensions together, as in nearly all tensors.
bool is_nested(const Strided& runs) {
  size_t inner = runs.run;
  for (size_t i = runs.counts.size(); i-- > 0;) {
    if (runs.counts[i] == 1) continue;
    if (runs.strides[i] < inner) return false;
    inner += (runs.counts[i] - 1) * runs.strides[i];
  }
  return true;
}

// True if two tensors of this nested layout have a byte in common. One begins `offset` bytes after the other. The
// function subtracts a multiple of each stride from the offset; the multiple must be less than the stride's count. The
// tensors share a byte if the rest can be made shorter than a run. Because the layout is nested, the rest for the inner
// dimensions is shorter than the stride, so only two multiples need be tried.
bool meets_itself(const Strided& runs, size_t dim, ptrdiff_t offset) {
  if (dim == runs.counts.size()) return std::abs(offset) < static_cast<ptrdiff_t>(runs.run);
  if (runs.counts[dim] == 1) return meets_itself(runs, dim + 1, offset);
  const auto stride = static_cast<ptrdiff_t>(runs.strides[dim]);
  const auto count = static_cast<ptrdiff_t>(runs.counts[dim]);
  const ptrdiff_t least = offset / stride - (offset % stride < 0 ? 1 : 0);
  for (const ptrdiff_t steps : {least, least + 1}) {
    if (std::abs(steps) < count && meets_itself(runs, dim + 1, offset - steps * stride)) return true;
  }
  return false;
}

// Calls `each` with the start address of every run.
template <class Each>
void for_runs(const Strided& runs, size_t dim, size_t at, Each& each) {
  if (dim == runs.counts.size()) return each(at);
  for (size_t i = 0; i < runs.counts[dim]; ++i) for_runs(runs, dim + 1, at + i * runs.strides[dim], each);
}

// True if the two have a byte in common.
bool share_memory(const Strided& left, const Strided& right) {
  const Piece a = extent(left);
  const Piece b = extent(right);
  if (!overlap(a, b)) return false;
  if (a.bytes == left.run && b.bytes == right.run) return true;
  if (left.run == right.run && left.counts == right.counts && left.strides == right.strides && is_nested(left)) {
    return meets_itself(left, 0, static_cast<ptrdiff_t>(left.addr) - static_cast<ptrdiff_t>(right.addr));
  }
  // For each byte in the overlap of the two extents: whether `left` contains it.
  const size_t begin = std::max(a.addr, b.addr);
  const size_t end = std::min(a.addr + a.bytes, b.addr + b.bytes);
  std::vector<bool> taken(end - begin);
  bool found = false;
  const auto within = [&](size_t at, size_t size, const auto& each) {
    for (size_t byte = std::max(at, begin); byte < std::min(at + size, end); ++byte) each(byte - begin);
  };
  const auto take = [&](size_t at) { within(at, left.run, [&](size_t byte) { taken[byte] = true; }); };
  const auto look = [&](size_t at) { within(at, right.run, [&](size_t byte) { found = found || taken[byte]; }); };
  for_runs(left, 0, left.addr, take);
  for_runs(right, 0, right.addr, look);
  return found;
}

}  // namespace

std::vector<bool> in_overlaps(c10::ArrayRef<at::Tensor> tensors) {
  std::vector<bool> found(tensors.size());
  for (const auto& [one, other] : overlapping(tensors)) found[one] = found[other] = true;
  return found;
}

std::optional<Places> shared(c10::ArrayRef<at::Tensor> tensors, const std::function<bool(Places)>& allowed) {
  for (const Places& pair : overlapping(tensors)) {
    if (allowed && allowed(pair)) continue;
    if (share_memory(runs_of(tensors[pair.first], true), runs_of(tensors[pair.second], true))) return pair;
  }
  return std::nullopt;
}

bool conflict(const std::vector<Strided>& one, const std::vector<Strided>& other) {
  return std::any_of(one.begin(), one.end(), [&](const Strided& mine) {
    return std::any_of(other.begin(), other.end(), [&](const Strided& theirs) {
      return (mine.written || theirs.written) && share_memory(mine, theirs);
    });
  });
}

Plan::Plan(const char* op, Kind kind, std::chrono::milliseconds timeout, bool by_vendor)
    : op(op), call(), by_vendor_(by_vendor) {
  call.kind = kind;
  call.timeout_ms = timeout.count();
  call.note.counts = true;
  call.note.tensors = 1;
  call.note.element = kNoType;
  call.note.site = call_site();
}

void Plan::combine(const at::Tensor& tensor, const c10d::ReduceOp& reduce_op) {
  call.dtype = check::reducible(op, tensor, by_vendor_);
  if (reduce_op.op_ >= c10d::ReduceOp::UNUSED) {
    value_error(op, c10::str("unknown reduce op number ", static_cast<int>(reduce_op.op_)));
  }
  call.op = static_cast<ReduceOp>(reduce_op.op_);  // ReduceOp has torch's numbers: lower/types.hpp
  if (reduce_op.op_ != c10d::ReduceOp::PREMUL_SUM) return;
  const PremulSupplement& supplement = premul(op, reduce_op);
  const at::Tensor& on_tensor = supplement.tensor_factor;
  if (on_tensor.defined() && !on_tensor.is_cpu() && by_vendor_) {
    // Reading it here would wait for the device, and would break a capture into a graph.
    factor = on_tensor.detach().reshape({});
    call.factor = 1;
    return;
  }
  // Read now, because the caller may change the tensor while the operation runs.
  call.factor = on_tensor.defined() ? on_tensor.item<double>() : supplement.double_factor;
}

bool Plan::is_direct(const at::Tensor& tensor) const {
  // True if the bytes in memory are the elements in order.
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() && (by_vendor_ || tensor.is_cpu());
}

at::Tensor Plan::temporary_for(const at::Tensor& tensor, bool written) {
  if (by_vendor_) return at::empty(tensor.sizes(), tensor.options());
  touched_.push_back(runs_of(tensor, written));
  call.staged = true;
  return at::Tensor(at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type()));
}

char* Plan::readable(const at::Tensor& tensor, bool stage) {
  // The core only reads through this pointer. The const_cast is needed because inputs and outputs are the same type
  // Piece.
  if (is_direct(tensor) && !stage) return const_cast<char*>(static_cast<const char*>(tensor.const_data_ptr()));
  before.push_back({temporary_for(tensor, false), tensor});
  return static_cast<char*>(before.back().temporary.mutable_data_ptr());
}

char* Plan::writable(const at::Tensor& tensor, bool stage) {
  if (is_direct(tensor) && !stage) return static_cast<char*>(tensor.mutable_data_ptr());
  after.push_back({temporary_for(tensor, true), tensor});
  return static_cast<char*>(after.back().temporary.mutable_data_ptr());
}

void Plan::read(const at::Tensor& tensor, bool stage) {
  call.note.element = static_cast<uint8_t>(tensor.scalar_type());
  if (tensor.numel() == 0) return;
  inputs_.push_back({reinterpret_cast<size_t>(readable(tensor, stage)), tensor.nbytes()});
}

void Plan::write(const at::Tensor& tensor, bool stage) {
  call.note.element = static_cast<uint8_t>(tensor.scalar_type());
  if (tensor.numel() == 0) return;
  outputs_.push_back({reinterpret_cast<size_t>(writable(tensor, stage)), tensor.nbytes()});
}

void Plan::write_all(c10::ArrayRef<at::Tensor> tensors) {
  const std::vector<bool> stage = in_overlaps(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) write(tensors[i], stage[i]);
}

void Plan::update(const at::Tensor& tensor, bool stage) {
  call.note.element = static_cast<uint8_t>(tensor.scalar_type());
  if (tensor.numel() == 0) return;
  // The writable pointer is taken first, because taking it may copy a copy-on-write tensor. The operation must then
  // read that copy.
  const size_t staged = after.size();
  char* memory = writable(tensor, stage);
  if (after.size() > staged) before.push_back(after.back());
  const Piece piece{reinterpret_cast<size_t>(memory), tensor.nbytes()};
  inputs_.push_back(piece);
  outputs_.push_back(piece);
}

void Plan::add(const at::Tensor& tensor, Role role) {
  switch (role) {
    case Role::kRead:
      return read(tensor);
    case Role::kWrite:
      return write(tensor);
    case Role::kUpdate:
      return update(tensor);
  }
}

void Plan::read_rows(const at::Tensor& tensor, const at::Tensor& rows) {
  call.note.element = static_cast<uint8_t>(tensor.scalar_type());
  add_rows(inputs_, static_cast<const char*>(tensor.const_data_ptr()), tensor, rows);
}

void Plan::write_rows(const at::Tensor& tensor, const at::Tensor& rows) {
  call.note.element = static_cast<uint8_t>(tensor.scalar_type());
  add_rows(outputs_, static_cast<const char*>(tensor.mutable_data_ptr()), tensor, rows);
}

void Plan::add_rows(Pieces& pieces, const char* base, const at::Tensor& tensor, const at::Tensor& rows) {
  if (tensor.numel() == 0) return;
  const size_t bytes = tensor.nbytes() / static_cast<size_t>(tensor.size(0));
  const auto* const indices = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows.numel(); ++i) {
    const int64_t row = indices[i];
    // Checked here once more, because another thread of the program may have changed the indices since.
    if (row < 0 || row >= tensor.size(0)) value_error(op, "the indices of rows changed during the call");
    const size_t at = reinterpret_cast<size_t>(base) + static_cast<size_t>(row) * bytes;
    if (!pieces.empty() && pieces.back().addr + pieces.back().bytes == at) {
      pieces.back().bytes += bytes;
    } else {
      pieces.push_back({at, bytes});
    }
  }
}

void Plan::add_blocks(Pieces& pieces, c10::ArrayRef<at::Tensor> tensors, const std::vector<char*>& bases,
                      size_t ranks) {
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const size_t block = tensors[i].nbytes() / ranks;
      if (block > 0) pieces.push_back({reinterpret_cast<size_t>(bases[i]) + rank * block, block});
    }
  }
}

void Plan::join_neighbours() {
  for (Pieces* const pieces : {&inputs_, &outputs_}) {
    Pieces joined;
    for (const Piece& piece : *pieces) {
      if (!joined.empty() && joined.back().addr + joined.back().bytes == piece.addr) {
        joined.back().bytes += piece.bytes;
      } else {
        joined.push_back(piece);
      }
    }
    *pieces = std::move(joined);
  }
}

void Plan::read_blocks(c10::ArrayRef<at::Tensor> tensors, size_t ranks) {
  call.note.element = static_cast<uint8_t>(tensors[0].scalar_type());
  std::vector<char*> bases;
  for (const at::Tensor& tensor : tensors) bases.push_back(tensor.numel() == 0 ? nullptr : readable(tensor, false));
  add_blocks(inputs_, tensors, bases, ranks);
}

void Plan::write_blocks(c10::ArrayRef<at::Tensor> tensors, size_t ranks) {
  std::vector<char*> bases;
  for (const at::Tensor& tensor : tensors) bases.push_back(tensor.numel() == 0 ? nullptr : writable(tensor, false));
  add_blocks(outputs_, tensors, bases, ranks);
}

void Plan::note_list(c10::ArrayRef<at::Tensor> tensors) {
  if (tensors.size() < 2) return;
  list.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) list.push_back({Dtype::kBytes, tensor.nbytes()});
}

Request Plan::request() const {
  return {call, slice(inputs_), slice(outputs_), slice(in_blocks), slice(out_blocks), slice(list), slice(touched_)};
}

rust::Box<RustOp> Plan::issue(const RustGroup& group, std::shared_ptr<Completion> completion) const {
  return checked([&] { return group.issue(request(), std::move(completion)); });
}

void Plan::run(const RustGroup& group, std::shared_ptr<Completion> completion) const {
  checked([&] { group.run(request(), std::move(completion)); });
}

}  // namespace sagellm
