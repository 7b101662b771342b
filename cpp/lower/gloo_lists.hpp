// Lists of tensors in an all_reduce, a broadcast or an all_gather, as gloo takes them: a rank with several tensors
// counts as several. c10d's own wrappers pass one; programs that call a group of gloo directly may pass more.
#pragma once

#include "lower/call.hpp"

namespace sagellm {

// True for a call of those three whose lists hold more than one tensor of this rank.
bool is_gloo_list(const CallDesc& call);

// Checks such a call, and makes one request out of it:
// - all_reduce: the sum of all tensors of all ranks, in each of them;
// - broadcast: the root's tensor number `root_tensor`, in each tensor of each rank;
// - all_gather: all tensors of rank 0, then those of rank 1 and so on, in each of the output lists.
void lower_gloo_list(Plan& plan, const CallDesc& call, const Carrier& carrier);

}  // namespace sagellm
