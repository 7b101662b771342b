#include "c10d/sparse.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "host/errors.hpp"
#include "lower/checks.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

using c10d::OpType;

namespace {

constexpr const char* kOp = "sparse all_reduce";

// This bit is set in the tags of sparse all-reduces. Users' tags do not have it, because c10d's tags are non-negative
// ints.
constexpr uint32_t kSparseTags = 1U << 31;

// The header that a rank sends to the other ranks: count of stored numbers, counts of sparse and of dense dimensions,
// type, then the sizes.
constexpr size_t kMaxDims = 16;
constexpr size_t kHeader = 4 + kMaxDims;
enum : size_t { kStored = 0, kSparseDims = 1, kDenseDims = 2, kType = 3, kSizes = 4 };

at::Tensor header_of(const at::Tensor& coalesced) {
  at::Tensor header = at::zeros({static_cast<int64_t>(kHeader)}, at::kLong);
  auto* fields = header.mutable_data_ptr<int64_t>();
  fields[kStored] = coalesced._nnz();
  fields[kSparseDims] = coalesced.sparse_dim();
  fields[kDenseDims] = coalesced.dense_dim();
  fields[kType] = static_cast<int64_t>(coalesced.scalar_type());
  for (int64_t dim = 0; dim < coalesced.dim(); ++dim) fields[kSizes + static_cast<size_t>(dim)] = coalesced.size(dim);
  return header;
}

void check_sparse(const at::Tensor& tensor, const c10d::ReduceOp& reduce_op) {
  if (!tensor.device().is_cpu()) {
    value_error(kOp, c10::str("tensor is on ", tensor.device(), ", expected one on cpu"));
  }
  if (reduce_op.op_ != c10d::ReduceOp::SUM && reduce_op.op_ != c10d::ReduceOp::AVG) {
    value_error(kOp, "only SUM and AVG can be computed for sparse tensors");
  }
  if (reduce_op.op_ == c10d::ReduceOp::AVG && !tensor.is_floating_point() && !tensor.is_complex()) {
    value_error(kOp,
                c10::str("AVG needs floating point or complex numbers, got ", check::dtype_name(tensor.scalar_type())));
  }
  check::reducible(kOp, tensor, false);
  if (tensor.dim() > static_cast<int64_t>(kMaxDims)) {
    value_error(kOp, c10::str("tensor has ", tensor.dim(), " dimensions, expected at most ", kMaxDims));
  }
}

std::string describe(const int64_t* header) {
  const auto dims = static_cast<size_t>(header[kSparseDims] + header[kDenseDims]);
  return c10::str(check::dtype_name(static_cast<at::ScalarType>(header[kType])), " of sizes ",
                  at::IntArrayRef(header + kSizes, dims), " with ", header[kSparseDims], " sparse dimensions");
}

// All ranks check the same headers, so all come to the same result.
void check_headers(const at::Tensor& headers, int ranks) {
  const auto* first = headers.const_data_ptr<int64_t>();
  for (int rank = 1; rank < ranks; ++rank) {
    const int64_t* other = first + static_cast<size_t>(rank) * kHeader;
    if (!std::equal(first + kSparseDims, first + kHeader, other + kSparseDims)) {
      raise(ErrorKind::kMismatch, c10::str("sagellm ", kOp, ": the ranks passed different tensors: rank 0 ",
                                           describe(first), ", rank ", rank, " ", describe(other)));
    }
  }
}

at::Tensor add_up(const std::vector<at::Tensor>& indices, const std::vector<at::Tensor>& values, const at::Tensor& like,
                  bool average) {
  const at::ScalarType type = like.scalar_type();
  at::Tensor numbers = at::cat(values, 0);
  // Floats of two bytes are added in float32 and rounded once, at the end.
  if (type == at::kHalf || type == at::kBFloat16) numbers = numbers.to(at::kFloat);
  at::Tensor sum =
      at::sparse_coo_tensor(at::cat(indices, 1), numbers, like.sizes(), like.options().dtype(numbers.scalar_type()))
          .coalesce();
  if (average) sum._values().div_(static_cast<double>(values.size()));
  return sum.to(type);
}

}  // namespace

// One call, run by a callback thread.
struct SparseCalls::Job {
  // Keeps `calls` alive.
  c10::intrusive_ptr<c10d::Backend> backend;
  const SparseCalls* calls = nullptr;
  c10::intrusive_ptr<SageWork> exchange;
  at::Tensor headers;
  at::Tensor tensor;
  // Indices and values of this rank.
  at::Tensor indices;
  at::Tensor values;
  bool average = false;
  uint32_t tag = 0;
  std::chrono::milliseconds timeout = kNoTimeout;

  c10::intrusive_ptr<SageWork> message(Kind kind, int peer, const at::Tensor& memory) const {
    const bool sends = kind == Kind::kSend;
    Plan plan(kOp, kind, timeout);
    plan.call.root = static_cast<uint32_t>(peer);
    plan.call.tag = tag;
    plan.uncounted();
    plan.add(memory, sends ? Role::kRead : Role::kWrite);
    return calls->issue_part(plan, sends ? OpType::SEND : OpType::RECV, {memory});
  }

  void run() const {
    const at::NoGradGuard no_grad;
    exchange->wait(kNoTimeout);
    const int ranks = calls->group_.size;
    check_headers(headers, ranks);
    std::vector<c10::intrusive_ptr<SageWork>> messages;
    std::vector<at::Tensor> all_indices(static_cast<size_t>(ranks), indices);
    std::vector<at::Tensor> all_values(static_cast<size_t>(ranks), values);
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == calls->group_.rank) continue;
      const auto place = static_cast<size_t>(rank);
      const int64_t stored = headers.const_data_ptr<int64_t>()[place * kHeader + kStored];
      auto sizes = values.sizes().vec();
      sizes[0] = stored;
      all_indices[place] = at::empty({indices.size(0), stored}, at::kLong);
      all_values[place] = at::empty(sizes, values.scalar_type());
      messages.push_back(message(Kind::kSend, rank, indices));
      messages.push_back(message(Kind::kSend, rank, values));
      messages.push_back(message(Kind::kRecv, rank, all_indices[place]));
      messages.push_back(message(Kind::kRecv, rank, all_values[place]));
    }
    for (const auto& work : messages) work->wait(kNoTimeout);
    tensor.copy_(add_up(all_indices, all_values, tensor, average));
  }
};

SparseCalls::WorkPtr SparseCalls::all_reduce(const CallDesc& call, c10::intrusive_ptr<c10d::Backend> backend) {
  const at::Tensor tensor = call.outputs.list()[0];
  check_sparse(tensor, *call.reduce_op);
  DeferredRelease::instance().release();
  const at::NoGradGuard no_grad;
  const at::Tensor coalesced = tensor.coalesce();
  const at::Tensor header = header_of(coalesced);
  auto job = std::make_shared<Job>();
  job->headers = at::empty({group_.size * static_cast<int64_t>(kHeader)}, at::kLong);
  job->tensor = tensor;
  job->indices = coalesced._indices().contiguous();
  job->values = coalesced._values().contiguous();
  job->average = call.reduce_op->op_ == c10d::ReduceOp::AVG;
  job->timeout = call.timeout;

  Plan plan(kOp, Kind::kAllGather, call.timeout);
  plan.read(header);
  plan.write(job->headers);
  // The statistics count the caller's call once, and do not count its parts.
  plan.uncounted();
  ExternalOp told = external_op(call, false);
  told.read = told.written = job->indices.nbytes() + job->values.nbytes();
  const auto note = std::make_shared<rust::Box<RustExternalOp>>(group_.core.composed_op(told));
  auto trace = Trace::start("sagellm:sparse_all_reduce", tensor);
  job->exchange = issue_part(plan, OpType::_ALLREDUCE_SPARSE, {header, job->headers});
  // All ranks issue the collectives of a group in the same order, so they choose the same tag.
  job->tag = kSparseTags | (count_++ & ~kSparseTags);
  job->backend = std::move(backend);
  job->calls = this;

  const SageWork::Known known{job->exchange->getSequencenumber(), group_.timeout_of(call)};
  auto made = c10::make_intrusive<SageWork>(group_.rank, OpType::_ALLREDUCE_SPARSE, Tensors{tensor}, group_.events,
                                            std::move(trace), known);
  WorkPtr work = in_background(std::move(made), call.async, [job, note] {
    const std::exception_ptr failure = failure_of([&] { job->run(); });
    if (failure) {
      (void)(*note)->failed({});
      std::rethrow_exception(failure);
    }
    (*note)->ended();
  });
  if (work) {
    (void)under_way();
    const std::lock_guard<std::mutex> lock(mutex_);
    works_.push_back(work);
  }
  return work;
}

std::vector<SparseCalls::WorkPtr> SparseCalls::under_way() {
  const std::lock_guard<std::mutex> lock(mutex_);
  works_.erase(std::remove_if(works_.begin(), works_.end(), [](const WorkPtr& work) { return work->isCompleted(); }),
               works_.end());
  return works_;
}

SparseCalls::WorkPtr SparseCalls::barrier_behind(std::vector<WorkPtr> earlier, const CallDesc& call) {
  Plan plan(call.op, call.kind, call.timeout);
  auto own = issue_part(plan, OpType::BARRIER, {});
  const SageWork::Known known{own->getSequencenumber(), group_.timeout_of(call)};
  auto work = c10::make_intrusive<SageWork>(group_.rank, OpType::BARRIER, Tensors(), group_.events, nullptr, known);
  return in_background(std::move(work), call.async, [own, earlier = std::move(earlier)] {
    wait_quietly(earlier);
    own->wait(kNoTimeout);
  });
}

c10::intrusive_ptr<SageWork> SparseCalls::issue_part(Plan& plan, OpType type, Tensors keep) const {
  auto work = c10::make_intrusive<SageWork>(group_.rank, type, Tensors(), std::make_shared<Events>(), nullptr);
  work->add(group_.core, plan, std::move(keep));
  work->seal();
  return work;
}

void SparseCalls::leave_to_parent() {
  // No lock is taken, because a thread of the parent may have held it at the fork.
  new auto(std::move(works_));
}

}  // namespace sagellm
