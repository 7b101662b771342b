#include "lower/checks.hpp"

#include <ATen/MemoryOverlap.h>

#include "host/errors.hpp"
#include "lower/plan.hpp"
#include "lower/types.hpp"

namespace sagellm::check {

std::string dtype_name(at::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);
}

const at::Tensor& only(const char* op, const char* what, const std::vector<at::Tensor>& tensors) {
  if (tensors.size() != 1) value_error(op, c10::str("expected one ", what, ", got ", tensors.size()));
  return tensors[0];
}

const std::vector<at::Tensor>& only(const char* op, const char* what,
                                    const std::vector<std::vector<at::Tensor>>& lists) {
  if (lists.size() != 1) value_error(op, c10::str("expected one ", what, ", got ", lists.size()));
  return lists[0];
}

void empty_elsewhere(const char* op, const char* what, const std::vector<std::vector<at::Tensor>>& lists, int64_t root,
                     int rank) {
  if (lists.empty() || (lists.size() == 1 && lists[0].empty())) return;
  value_error(op, c10::str("only the root, rank ", root, ", may pass an ", what, "; this is rank ", rank));
}

void dense(const char* op, const char* what, const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) value_error(op, c10::str(what, " is undefined"));
  if (tensor.device() != device) {
    value_error(op, c10::str(what, " is on ", tensor.device(), ", expected one on ", device));
  }
  if (tensor.layout() != at::kStrided) {
    value_error(op, c10::str(what, " has layout ", tensor.layout(), ", expected a dense one (torch.strided)"));
  }
}

void apart_in_itself(const char* op, const char* what, const at::Tensor& tensor) {
  if (!tensor.is_contiguous() && at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    value_error(op, c10::str(what, " of sizes ", tensor.sizes(), " and strides ", tensor.strides(),
                             " shares memory between its elements (an expanded tensor?); pass a clone"));
  }
}

void writable(const char* op, const char* what, const at::Tensor& tensor, c10::Device device) {
  dense(op, what, tensor, device);
  apart_in_itself(op, what, tensor);
}

void on_device(const char* op, const at::Tensor& tensor, bool written, std::optional<c10::Device>& device) {
  if (device.has_value() && *device != tensor.device()) {
    value_error(op, c10::str("tensors are on ", *device, " and on ", tensor.device(), ", expected all on one device"));
  }
  device = tensor.device();
  if (tensor.is_cpu()) return;
  if (tensor.is_meta()) {
    value_error(op, c10::str("tensor is on ", tensor.device(), ", which has no data"));
  }
  if (tensor.layout() != at::kStrided) {
    value_error(op, c10::str("tensor on ", tensor.device(), " has layout ", tensor.layout(),
                             ", expected a dense one (torch.strided)"));
  }
  if (written) apart_in_itself(op, "tensor", tensor);
}

void same_dtype(const char* op, const at::Tensor& expected, const at::Tensor& found) {
  if (expected.scalar_type() != found.scalar_type()) {
    value_error(op, c10::str("all tensors must have the same dtype, got ", dtype_name(expected.scalar_type()), " and ",
                             dtype_name(found.scalar_type())));
  }
}

void root(const char* op, int64_t root, int64_t root_tensor, int size) {
  if (root < 0 || root >= size) {
    value_error(op, c10::str("root rank is ", root, ", expected 0 to ", size - 1, " (the group has ", size, " ranks)"));
  }
  if (root_tensor != 0) value_error(op, c10::str("root tensor is ", root_tensor, ", expected 0: there is only one"));
}

void peer(const char* op, int64_t peer, int rank, int size, bool may_be_oneself) {
  if (peer < 0 || peer >= size) {
    value_error(op, c10::str("peer rank is ", peer, ", expected 0 to ", size - 1, " (the group has ", size, " ranks)"));
  }
  if (peer == rank && !may_be_oneself) value_error(op, c10::str("peer rank is ", peer, ", which is this rank itself"));
}

void tag(const char* op, int tag) {
  if (tag < 0) value_error(op, c10::str("tag is ", tag, ", expected 0 or more"));
}

void per_rank(const char* op, const char* what, size_t length, int size) {
  if (length != static_cast<size_t>(size)) {
    value_error(op, c10::str(what, " has ", length, " tensors, the group has ", size, " ranks"));
  }
}

void same_length(const char* op, const char* what, size_t length, const char* other, size_t expected) {
  if (length != expected) value_error(op, c10::str(what, " has ", length, " tensors, ", other, " has ", expected));
}

void not_empty(const char* op, const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) value_error(op, "the list of tensors is empty, expected at least one");
}

void elements(const char* op, const char* what, int64_t found, int64_t expected, const char* because) {
  if (found != expected) {
    value_error(op, c10::str(what, " has ", found, " elements, expected ", expected, " (", because, ")"));
  }
}

void apart(const char* op, const std::vector<at::Tensor>& written, const std::vector<at::Tensor>& read) {
  if (written.size() < 2) return;
  std::vector<at::Tensor> all = written;
  all.insert(all.end(), read.begin(), read.end());
  const size_t count = written.size();
  for (const auto& [one, other] : overlapping(all)) {
    if (one >= count || other == one + count || !share_memory(all[one], all[other])) continue;
    if (other < count) {
      value_error(op,
                  c10::str("tensors ", one, " and ", other,
                           " of the list share memory, which would be written twice; pass each piece of memory once"));
    }
    value_error(op, c10::str("output tensor ", one, " and input tensor ", other - count,
                             " share memory; make the calls one after the other, or pass a clone"));
  }
}

std::vector<size_t> splits(const char* op, const char* what, const at::Tensor& tensor,
                           const std::vector<int64_t>& sizes, int size) {
  const auto ranks = static_cast<size_t>(size);
  if (tensor.dim() == 0) value_error(op, c10::str(what, " has no dimension to split"));
  const int64_t rows = tensor.size(0);
  if (sizes.empty()) {
    if (rows % size != 0) {
      value_error(op, c10::str(what, " has ", rows, " rows, which do not divide evenly among ", size,
                               " ranks; pass split sizes"));
    }
    return std::vector<size_t>(ranks, tensor.nbytes() / ranks);
  }
  if (sizes.size() != ranks) {
    value_error(op, c10::str("the list of ", what, " split sizes has ", sizes.size(), " entries, the group has ", size,
                             " ranks"));
  }
  const size_t row_bytes = rows == 0 ? 0 : tensor.nbytes() / static_cast<size_t>(rows);
  std::vector<size_t> bytes;
  bytes.reserve(ranks);
  int64_t sum = 0;
  for (const int64_t part : sizes) {
    // The second condition keeps the sum from overflowing.
    if (part < 0 || part > rows) {
      value_error(op, c10::str(what, " split size is ", part, ", expected 0 to ", rows, " (its rows)"));
    }
    sum += part;
    bytes.push_back(static_cast<size_t>(part) * row_bytes);
  }
  if (sum != rows) {
    value_error(op, c10::str(what, " split sizes add up to ", sum, ", but it has ", rows, " rows"));
  }
  return bytes;
}

Dtype reducible(const char* op, const at::Tensor& tensor, bool by_vendor) {
  const std::optional<Dtype> dtype = dtype_of(tensor.scalar_type());
  const bool float8 = dtype == Dtype::kF8E4M3 || dtype == Dtype::kF8E5M2;
  // Whether a device's library can combine these is its recipe's to say.
  if (dtype && (!float8 || by_vendor)) return *dtype;
  value_error(op, c10::str(dtype_name(tensor.scalar_type()),
                           " numbers cannot be combined, only moved; convert them to float16 or wider first"));
}

}  // namespace sagellm::check
