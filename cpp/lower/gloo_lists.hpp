// Lists of several tensors in an all_reduce, a broadcast or an all_gather, with the meaning that gloo gives them: a
// rank that passes several tensors counts as several ranks. c10d's own wrappers pass one tensor; programs that call a
// gloo group directly may pass more.
#pragma once

#include "lower/call.hpp"

namespace sagellm {

// True for an all_reduce, broadcast or all_gather whose lists hold more than one tensor of this rank.
bool is_gloo_list(const CallDesc& call);

// Checks such a call and makes one request for it. The results are:
// - all_reduce: each tensor of each rank gets the sum of all tensors of all ranks;
// - broadcast: each tensor of each rank gets the root's tensor number `root_tensor`;
// - all_gather: each output list gets all tensors of rank 0, then all of rank 1 and so on.
void lower_gloo_list(Plan& plan, const CallDesc& call, const Carrier& carrier);

}  // namespace sagellm
