// The checks of a call that need no other rank. A failed check throws a ValueError that names the call, the expected
// and the actual value. All checks run before anything is issued, because a collective that only some ranks issue would
// hang the group.
#pragma once

#include <string>
#include <vector>

#include "lower/call.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm::check {

// Checks the arguments of a call: each is present, the carrier accepts its tensors, and their types and sizes match the
// other arguments.
void call(const CallDesc& call, const Carrier& carrier);

// Checks the arguments of a call whose lists hold several tensors of this rank (gloo_lists.hpp).
void gloo_list(const CallDesc& call, const Carrier& carrier);

// Checks only the peer and the tag of a message. A delegate that carries the message checks the rest.
void message(const CallDesc& call, const Carrier& carrier);

// Checks that the tensors of a coalesced call share no memory. Its parts run together, so with shared memory the result
// would differ from that of running them one after the other.
void apart(const CallDesc& call);

// Returns the device of a call that has tensors on a device. Throws unless all tensors are on that device and are
// usable there.
c10::Device device_of(const CallDesc& call);

// Checks the row indices of an all_to_all or a message of rows. No row is written twice, and input and output share no
// memory.
void rows(const CallDesc& call);

// Bytes of each rank's block in a call whose tensors are split along their first dimension.
struct Splits {
  std::vector<size_t> outputs;
  std::vector<size_t> inputs;
};
Splits splits(const CallDesc& call, int size);

// Returns the dtype of a tensor whose elements are to be combined. Only a vendor's library may combine floats of 8
// bits.
Dtype reducible(const char* op, const at::Tensor& tensor, bool by_vendor);

// torch's name of an element type, as users write it.
std::string dtype_name(at::ScalarType type);

}  // namespace sagellm::check
