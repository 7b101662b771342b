#include "lower/checks.hpp"

#include <ATen/MemoryOverlap.h>

#include "host/errors.hpp"
#include "lower/types.hpp"

namespace sagellm::check {

namespace {

using View = c10::ArrayRef<at::Tensor>;
using Tensors = Operand::Tensors;

// Each function checks one property of an argument. Error texts contain `op`, the name of the call, and `what`, the
// name of the argument, such as "output tensor".

// A list that must hold exactly one item. All of c10d's calls on a single tensor pass such a list.
template <class Item>
const Item& only(const char* op, const char* what, const std::vector<Item>& list) {
  if (list.size() != 1) value_error(op, c10::str("expected one ", what, ", got ", list.size()));
  return list[0];
}

// The list must be empty on ranks other than the root.
void empty_elsewhere(const char* op, const char* what, const std::vector<std::vector<at::Tensor>>& lists, int64_t root,
                     int rank) {
  if (lists.empty() || (lists.size() == 1 && lists[0].empty())) return;
  value_error(op, c10::str("only the root, rank ", root, ", may pass an ", what, "; this is rank ", rank));
}

// The tensor must be defined, strided, and on `device`.
void dense(const char* op, const char* what, const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) value_error(op, c10::str(what, " is undefined"));
  if (tensor.device() != device) {
    value_error(op, c10::str(what, " is on ", tensor.device(), ", expected one on ", device));
  }
  if (tensor.layout() != at::kStrided) {
    value_error(op, c10::str(what, " has layout ", tensor.layout(), ", expected a dense one (torch.strided)"));
  }
}

// No two elements of the tensor may share memory, as they do in an expanded tensor.
void apart_in_itself(const char* op, const char* what, const at::Tensor& tensor) {
  if (!tensor.is_contiguous() && at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    value_error(op, c10::str(what, " of sizes ", tensor.sizes(), " and strides ", tensor.strides(),
                             " shares memory between its elements (an expanded tensor?); pass a clone"));
  }
}

// Checks one tensor of a call that has tensors on a device. The first tensor sets `device`; all others must be on it.
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

void in_group(const char* op, const char* what, int64_t rank, int size) {
  if (rank < 0 || rank >= size) {
    value_error(op, c10::str(what, " is ", rank, ", expected 0 to ", size - 1, " (the group has ", size, " ranks)"));
  }
}

void root(const char* op, int64_t root, int64_t root_tensor, int size) {
  in_group(op, "root rank", root, size);
  if (root_tensor != 0) value_error(op, c10::str("root tensor is ", root_tensor, ", expected 0: there is only one"));
}

void peer(const char* op, int64_t peer, int rank, int size, bool may_be_oneself) {
  in_group(op, "peer rank", peer, size);
  if (peer == rank && !may_be_oneself) value_error(op, c10::str("peer rank is ", peer, ", which is this rank itself"));
}

void tag(const char* op, int tag) {
  if (tag < 0) value_error(op, c10::str("tag is ", tag, ", expected 0 or more"));
}

// A list must have one tensor (or one list) for each rank.
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

// Checks a list whose calls are carried out together. A tensor of `written` must not share memory with another tensor
// of `written`, nor with a tensor of `read` at a different index. Otherwise the result would differ from that of making
// the calls one after the other. The tensors may be on any device.
void apart(const char* op, const std::vector<at::Tensor>& written, const std::vector<at::Tensor>& read = {}) {
  if (written.size() < 2) return;
  const size_t count = written.size();
  const auto allowed = [count](Places pair) { return pair.first >= count || pair.second == pair.first + count; };
  std::vector<at::Tensor> all;
  if (!read.empty()) {
    all = written;
    all.insert(all.end(), read.begin(), read.end());
  }
  const auto found = shared(read.empty() ? written : all, allowed);
  if (!found) return;
  const auto [one, other] = *found;
  if (other < count) {
    value_error(op,
                c10::str("tensors ", one, " and ", other,
                         " of the list share memory, which would be written twice; pass each piece of memory once"));
  }
  value_error(op, c10::str("output tensor ", one, " and input tensor ", other - count,
                           " share memory; make the calls one after the other, or pass a clone"));
}

// Bytes of each rank's part of the operand's rows. `sizes` is c10d's list of split sizes in rows; empty means equal
// parts.
std::vector<size_t> split(const char* op, const char* what, const Operand& operand, const std::vector<int64_t>& sizes,
                          int size) {
  const at::Tensor& tensor = operand.tensor();
  const auto ranks = static_cast<size_t>(size);
  if (tensor.dim() == 0) value_error(op, c10::str(what, " has no dimension to split"));
  const int64_t rows = operand.rows == nullptr ? tensor.size(0) : operand.rows->numel();
  if (sizes.empty() && operand.rows == nullptr) {
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
  const int64_t all = tensor.size(0);
  const size_t row_bytes = all == 0 ? 0 : tensor.nbytes() / static_cast<size_t>(all);
  std::vector<size_t> bytes;
  bytes.reserve(ranks);
  int64_t sum = 0;
  for (const int64_t part : sizes) {
    // The upper bound keeps the sum from overflowing.
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

// ------------------------------------------------------------------------------------------------ calls

// Checks the lengths of an argument's lists, and each of its tensors by itself.
void check_argument(const CallDesc& call, const Operand& operand, const Carrier& carrier) {
  const bool input = &operand == &call.inputs;
  const char* const name = call.has_one_argument() ? "tensor" : input ? "input tensor" : "output tensor";
  const char* const list = input ? "input list" : "output list";
  if (call.coalesced) {
    if (operand.is_lists()) per_rank(call.op, "list of output lists", operand.parts(), carrier.size);
  } else if (operand.is_lists()) {
    // In a gather or scatter only the root passes the blocks of all ranks.
    const bool rooted = call.kind == Kind::kGather || call.kind == Kind::kScatter;
    if (rooted && call.root != carrier.rank) {
      return empty_elsewhere(call.op, list, operand.lists(), call.root, carrier.rank);
    }
    per_rank(call.op, list, only(call.op, list, operand.lists()).size(), carrier.size);
  } else if (operand.is_list()) {
    if (operand.blocks == Blocks::kPerRank) {
      per_rank(call.op, list, operand.list().size(), carrier.size);
    } else {
      only(call.op, name, operand.list());
    }
  }
  // The tensor of a broadcast or a reduce is written on at least one rank. All ranks check it as a tensor that is
  // written, so that either all ranks reject it or none.
  const bool in_place = call.kind == Kind::kBroadcast || call.kind == Kind::kReduce;
  const bool written = operand.role != Role::kRead || in_place;
  operand.for_each([&](const at::Tensor& tensor) {
    dense(call.op, name, tensor, carrier.device);
    if (written) apart_in_itself(call.op, name, tensor);
  });
}

// Compares the number of elements of the ranks' blocks, in `in` or `out`, with that of this rank's own tensor.
void check_blocks(const CallDesc& call, View in, View out, const Carrier& carrier) {
  const char* const op = call.op;
  const auto own = static_cast<size_t>(carrier.rank);
  const auto each = [&](const char* what, View blocks, int64_t expected, const char* because) {
    for (const at::Tensor& block : blocks) elements(op, what, block.numel(), expected, because);
  };
  switch (call.kind) {
    case Kind::kAllGather:
      return elements(op, "this rank's output tensor", out[own].numel(), in[0].numel(), "as many as the input tensor");
    case Kind::kGather:
      return each("output tensor", out, in[0].numel(), "as many as the input tensor");
    case Kind::kScatter:
      return each("input tensor", in, out[0].numel(), "as many as the output tensor");
    case Kind::kReduceScatter:
      return elements(op, "output tensor", out[0].numel(), in[own].numel(), "as many as this rank's input tensor");
    case Kind::kAllToAll:
      return elements(op, "this rank's output tensor", out[own].numel(), in[own].numel(),
                      "as many as its input tensor");
    default:
      return;
  }
}

// Checks types and sizes of the inputs against those of the outputs, for a call or for one element of a coalesced call.
void check_pair(const CallDesc& call, View in, View out, const Carrier& carrier) {
  if (in.empty() || out.empty()) return;
  const bool scatters = call.outputs.blocks == Blocks::kOwn;
  const at::Tensor& own = scatters ? out[0] : in[0];
  for (const View tensors : {in, out}) {
    for (const at::Tensor& tensor : tensors) same_dtype(call.op, own, tensor);
  }
  const Operand& blocks = scatters ? call.inputs : call.outputs;
  if (blocks.blocks == Blocks::kEqual) {
    elements(call.op, scatters ? "input tensor" : "output tensor", (scatters ? in : out)[0].numel(),
             own.numel() * carrier.size, "one block per rank");
  } else if (blocks.blocks == Blocks::kPerRank) {
    check_blocks(call, in, out, carrier);
  }
}

void check_lists(const CallDesc& call, const Carrier& carrier) {
  const Operand& outputs = call.outputs;
  const Operand& first = call.has_one_argument() ? outputs : call.inputs;
  not_empty(call.op, first.list());
  if (outputs.is_list())
    same_length(call.op, "the output list", outputs.list().size(), "the input list", first.list().size());
  check_argument(call, call.inputs, carrier);
  check_argument(call, outputs, carrier);
  if (call.has_one_argument()) return;
  for (size_t part = 0; part < outputs.parts(); ++part) {
    const View out = outputs.part(part);
    if (outputs.is_lists()) same_length(call.op, "an output list", out.size(), "the input list", first.list().size());
    for (size_t i = 0; i < out.size(); ++i) {
      const at::Tensor& in = call.inputs.list()[i];
      if (outputs.is_list()) {
        check_pair(call, in, out[i], carrier);
        continue;
      }
      same_dtype(call.op, in, out[i]);
      elements(call.op, "output tensor", out[i].numel(), in.numel(), "as many as its input tensor");
    }
  }
}

}  // namespace

std::string dtype_name(at::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);
}

Dtype reducible(const char* op, const at::Tensor& tensor, bool by_vendor) {
  const std::optional<Dtype> dtype = dtype_of(tensor.scalar_type());
  const bool float8 = dtype == Dtype::kF8E4M3 || dtype == Dtype::kF8E5M2;
  // For 8-bit floats, the lowering decides whether the device's library can combine them.
  if (dtype && (!float8 || by_vendor)) return *dtype;
  value_error(op, c10::str(dtype_name(tensor.scalar_type()),
                           " numbers cannot be combined, only moved; convert them to float16 or wider first"));
}

void message(const CallDesc& call, const Carrier& carrier) {
  if (call.root != kAnyRank) peer(call.op, call.root, carrier.rank, carrier.size, carrier.to_itself);
  tag(call.op, call.tag);
}

void call(const CallDesc& call, const Carrier& carrier) {
  if (call.coalesced) {
    if (call.is_message()) message(call, carrier);
    return check_lists(call, carrier);
  }
  // The root is checked first, because it decides which ranks may pass a list.
  if (call.has_root()) root(call.op, call.root, call.root_tensor, carrier.size);
  check_argument(call, call.inputs, carrier);
  check_argument(call, call.outputs, carrier);
  if (call.is_message()) message(call, carrier);
  check_pair(call, call.inputs.first(), call.outputs.first(), carrier);
  if (call.names_rows()) rows(call);
}

void gloo_list(const CallDesc& call, const Carrier& carrier) {
  const bool gathers = call.kind == Kind::kAllGather;
  const Tensors& own = gathers ? call.inputs.list() : call.outputs.list();
  for (const Operand* operand : {&call.inputs, &call.outputs}) {
    operand->for_each([&](const at::Tensor& tensor) {
      dense(call.op, "tensor", tensor, carrier.device);
      if (operand->role != Role::kRead) apart_in_itself(call.op, "tensor", tensor);
      same_dtype(call.op, own[0], tensor);
      if (tensor.sizes() != own[0].sizes()) {
        value_error(call.op, c10::str("a tensor has the shape ", tensor.sizes(),
                                      ", expected that of the first of the list, ", own[0].sizes()));
      }
    });
  }
  if (call.kind == Kind::kBroadcast) {
    in_group(call.op, "root rank", call.root, carrier.size);
    const auto count = static_cast<int64_t>(own.size());
    if (call.root_tensor < 0 || call.root_tensor >= count) {
      value_error(call.op, c10::str("root tensor is ", call.root_tensor, ", expected 0 to ", count - 1));
    }
  } else if (gathers) {
    same_length(call.op, "the list of output lists", call.outputs.lists().size(), "the input list", own.size());
    for (const Tensors& list : call.outputs.lists()) {
      const size_t expected = own.size() * static_cast<size_t>(carrier.size);
      if (list.size() != expected) {
        value_error(call.op, c10::str("an output list has ", list.size(), " tensors, expected ", expected, ": ",
                                      own.size(), " of each of the ", carrier.size, " ranks"));
      }
    }
  } else if (call.reduce_op->op_ >= c10d::ReduceOp::PREMUL_SUM || at::isFloat8Type(own[0].scalar_type()) ||
             at::isBarebonesUnsignedType(own[0].scalar_type())) {
    value_error(call.op, c10::str("several tensors of ", dtype_name(own[0].scalar_type()),
                                  " cannot be combined by this op; pass one tensor, or all_reduce_coalesced"));
  }
}

void rows(const CallDesc& call) {
  const auto check = [&](const char* what, const Operand& operand) {
    if (operand.rows == nullptr) return;
    const at::Tensor& tensor = operand.first()[0];
    const at::Tensor& rows = *operand.rows;
    for (const at::Tensor* const each : {&tensor, &rows}) {
      // Most tensors of such subclasses have no memory of their own; only Python knows the tensors that they wrap.
      if (each->key_set().has(c10::DispatchKey::Python)) {
        value_error(call.op,
                    c10::str(what, " or its indices are a subclass of Tensor with its own __torch_dispatch__"));
      }
    }
    if (tensor.dim() == 0 || !tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) {
      value_error(call.op, c10::str(what, " of shape ", tensor.sizes(), " does not have contiguous rows in memory"));
    }
    if (!rows.is_cpu() || rows.scalar_type() != at::kLong || rows.dim() != 1 || !rows.is_contiguous()) {
      value_error(call.op,
                  c10::str("the indices of ", what, " are ", dtype_name(rows.scalar_type()), " of shape ", rows.sizes(),
                           " on ", rows.device(), ", expected a contiguous list of int64 on the CPU"));
    }
    const auto* const indices = rows.const_data_ptr<int64_t>();
    std::vector<bool> written(operand.role == Role::kRead ? 0 : static_cast<size_t>(tensor.size(0)));
    for (int64_t i = 0; i < rows.numel(); ++i) {
      const int64_t row = indices[i];
      if (row < 0 || row >= tensor.size(0)) {
        value_error(call.op, c10::str(what, " has no row ", row, ", it has ", tensor.size(0), " rows"));
      }
      if (written.empty()) continue;
      if (written[static_cast<size_t>(row)]) {
        value_error(call.op, c10::str("row ", row, " of ", what, " would be written twice"));
      }
      written[static_cast<size_t>(row)] = true;
    }
  };
  if (call.is_message()) return check("tensor", call.outputs);
  check("input", call.inputs);
  check("output", call.outputs);
  if (overlap(call.inputs.tensor(), call.outputs.tensor())) {
    value_error(call.op, "input and output share memory");
  }
}

Splits splits(const CallDesc& call, int size) {
  const at::Tensor& out = call.outputs.tensor();
  const at::Tensor& in = call.inputs.tensor();
  Splits sizes;
  sizes.outputs = split(call.op, "output", call.outputs, *call.output_splits, size);
  sizes.inputs = split(call.op, "input", call.inputs, *call.input_splits, size);
  if (call.output_splits->empty() && call.input_splits->empty()) {
    elements(call.op, "output tensor", out.numel(), in.numel(), "as many as the input tensor");
  }
  return sizes;
}

void apart(const CallDesc& call) {
  const Operand& outputs = call.outputs;
  if (!outputs.is_lists()) return apart(call.op, outputs.list(), call.inputs.first().vec());
  if (call.inputs.list().size() < 2) return;
  apart(call.op, outputs.flat());
  for (const auto& list : outputs.lists()) apart(call.op, list, call.inputs.list());
}

c10::Device device_of(const CallDesc& call) {
  std::optional<c10::Device> device;
  for (const Operand* operand : {&call.inputs, &call.outputs}) {
    const bool written = operand->role != Role::kRead;
    operand->for_each([&](const at::Tensor& tensor) {
      // Undefined tensors are rejected later, with the name of their argument.
      if (tensor.defined()) on_device(call.op, tensor, written, device);
    });
  }
  return *device;
}

}  // namespace sagellm::check
