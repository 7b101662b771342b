// What can be said about a call without asking another rank. Every failed check is a ValueError that names the call,
// what was expected and what came, before anything is issued: half a collective would hang the group.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "compat.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm::check {

// `op` is the call's name in messages, `what` the argument's ("output tensor", say).

// torch's name of a type, as users write it.
std::string dtype_name(at::ScalarType type);

// A list that must hold exactly one item, as all of c10d's single-tensor calls pass it.
const at::Tensor& only(const char* op, const char* what, const std::vector<at::Tensor>& tensors);
const std::vector<at::Tensor>& only(const char* op, const char* what,
                                    const std::vector<std::vector<at::Tensor>>& lists);
// The other way round for calls where only the root passes a list.
void empty_elsewhere(const char* op, const char* what, const std::vector<std::vector<at::Tensor>>& lists, int64_t root,
                     int rank);

// Defined, on `device`, strided.
void dense(const char* op, const char* what, const at::Tensor& tensor, c10::Device device);
// Also not expanded: two of its elements may not share memory.
void writable(const char* op, const char* what, const at::Tensor& tensor, c10::Device device);
// One of a call's tensors where some are on a device: all must be on `device`, which the first one sets.
void on_device(const char* op, const at::Tensor& tensor, bool written, std::optional<c10::Device>& device);

void same_dtype(const char* op, const at::Tensor& expected, const at::Tensor& found);

void root(const char* op, int64_t root, int64_t root_tensor, int size);
void peer(const char* op, int64_t peer, int rank, int size, bool may_be_oneself);
void tag(const char* op, int tag);

// One tensor (or list) a rank.
void per_rank(const char* op, const char* what, size_t length, int size);
void same_length(const char* op, const char* what, size_t length, const char* other, size_t expected);
void not_empty(const char* op, const std::vector<at::Tensor>& tensors);

void elements(const char* op, const char* what, int64_t found, int64_t expected, const char* because);

// For a list whose calls are carried out together: none of `written` may share memory with another, nor with one of
// `read` at another place of its list. One after the other would give something else. Tensors on any device.
void apart(const char* op, const std::vector<at::Tensor>& written, const std::vector<at::Tensor>& read = {});

// Bytes of each rank's part of `tensor`, cut along its first dimension as c10d's split lists say (empty: evenly).
std::vector<size_t> splits(const char* op, const char* what, const at::Tensor& tensor,
                           const std::vector<int64_t>& sizes, int size);

// The type of a tensor whose elements are combined. A vendor's library may combine floats of 8 bits, too.
Dtype reducible(const char* op, const at::Tensor& tensor, bool by_vendor);

}  // namespace sagellm::check
