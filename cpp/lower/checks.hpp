// The checks of a call that need no other rank. Every failed check is a ValueError that names the call, what was
// expected and what came, before anything is issued: half a collective would hang the group.
#pragma once

#include <string>
#include <vector>

#include "lower/call.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm::check {

// Checks the arguments of a call: each is there, is a tensor that the call's carrier takes, and has a type and size
// that fit the others.
void call(const CallDesc& call, const Carrier& carrier);

// The same for one whose lists hold several tensors of this rank (gloo_lists.hpp).
void gloo_list(const CallDesc& call, const Carrier& carrier);

// Checks the peer and the tag of a message alone: a delegate that carries it checks the rest.
void message(const CallDesc& call, const Carrier& carrier);

// Checks that lists which are carried out together share no memory, because then the result would differ from that of
// the calls one after the other.
void apart(const CallDesc& call);

// The device of a call that has tensors on one: all must be on it, and it must be able to use them.
c10::Device device_of(const CallDesc& call);

// Bytes of each rank's block in a call whose tensors are cut along their first dimension.
struct Splits {
  std::vector<size_t> outputs;
  std::vector<size_t> inputs;
};
Splits splits(const CallDesc& call, int size);

// The type of a tensor whose elements are combined. A vendor's library may combine floats of 8 bits, too.
Dtype reducible(const char* op, const at::Tensor& tensor, bool by_vendor);

// torch's name of a type, as users write it.
std::string dtype_name(at::ScalarType type);

}  // namespace sagellm::check
