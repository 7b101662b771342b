// Makes groups out of this one: of some of its ranks (split), or of all ranks except the excluded ones (shrink).
//
// The ranks of the new group meet through the store, like those of any group. If this group is bound to a device, and
// the vendor's library can make a communicator out of an existing one, the library immediately makes the new group's
// communicator out of this group's. First all ranks that the library waits for must agree that they can take part: a
// rank alone in the library's call would wait until the deadline. Otherwise the new group's first call on the device
// makes a communicator, from a new id.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <torch/csrc/utils/pybind.h>
#include <algorithm>
#include <limits>
#include <map>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "c10d/backend.hpp"
#include "device/vendor.hpp"
#include "host/errors.hpp"

namespace sagellm {

namespace {

// c10d's only flag of `shrink`.
constexpr int kShrinkAbort = 1;
// Name of the calls that send the ids of communicators, in error texts and in traces.
constexpr const char* kIdOp = "communicator";
constexpr const char* kIdTitle = "sagellm:communicator";

std::vector<uint32_t> unsigned_ranks(const std::vector<int>& ranks) {
  return {ranks.begin(), ranks.end()};
}

}  // namespace

void SageBackend::run_own(const CallDesc& call, CallDesc::Delegate delegate) {
  if (delegate_.serves()) {
    if (const WorkPtr work = delegate(*delegate_.backend(), call)) work->wait();
    return;
  }
  Plans plans = lower(call, {getRank(), getSize(), c10::kCPU});
  plans[0].uncounted();
  run(plans[0], call.label, call.traced());
}

void SageBackend::broadcast_id(at::Tensor& bytes) {
  Tensors tensors{bytes};
  const c10d::BroadcastOptions opts;
  CallDesc call(kIdOp, Kind::kBroadcast, {kIdTitle, c10d::OpType::BROADCAST}, opts);
  call.outputs = {tensors, getRank() == 0 ? Role::kRead : Role::kWrite};
  run_own(call, [&](c10d::Backend& other, const CallDesc&) { return other.broadcast(tensors, opts); });
}

void SageBackend::pass_id(at::Tensor& bytes, int from, int to) {
  using c10d::OpType;
  Tensors tensors{bytes};
  // The largest tag that c10d allows; programs are not expected to use it.
  constexpr int kTag = std::numeric_limits<int>::max();
  const bool gives = getRank() == from;
  CallDesc call(kIdOp, gives ? Kind::kSend : Kind::kRecv, {kIdTitle, gives ? OpType::SEND : OpType::RECV},
                gives ? to : from, kTag);
  call.outputs = {tensors, gives ? Role::kRead : Role::kWrite};
  run_own(call, [&](c10d::Backend& other, const CallDesc&) {
    return gives ? other.send(tensors, to, kTag) : other.recv(tensors, from, kTag);
  });
}

bool SageBackend::agree(bool yes) {
  if (getSize() == 1) return yes;
  at::Tensor vote = at::full({1}, yes ? 1 : 0, at::kByte);
  Tensors tensors{vote};
  c10d::AllreduceOptions opts;
  opts.reduceOp = c10d::ReduceOp::MIN;
  CallDesc call("agree", Kind::kAllReduce, {"sagellm:agree", c10d::OpType::ALLREDUCE}, opts, &opts.reduceOp);
  call.outputs = {tensors, Role::kUpdate};
  run_own(call, [&](c10d::Backend& other, const CallDesc&) { return other.allreduce(tensors, opts); });
  return vote.item<uint8_t>() == 1;
}

c10::intrusive_ptr<SageBackend> SageBackend::part(const std::string& prefix, const std::vector<int>& ranks,
                                                  const c10::intrusive_ptr<c10d::Backend::Options>& given,
                                                  const std::string& name) {
  const auto* const ours = dynamic_cast<const Options*>(given.get());
  auto options = ours != nullptr ? ours->copy() : options_->copy();
  if (given) options->timeout = given->timeout;
  options->as_gloo = options_->as_gloo;
  options->group_name = given && !given->group_name.empty() ? given->group_name : name;
  options->group_desc = given ? given->group_desc : "";
  const std::vector<uint64_t>& all = options_->global_ranks_in_group;
  options->global_ranks_in_group.clear();
  for (const int rank : ranks) {
    options->global_ranks_in_group.push_back(all.empty() ? static_cast<uint64_t>(rank)
                                                         : all[static_cast<size_t>(rank)]);
  }
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  // The Python package makes the child, as it makes every group. The child may need groups of torch's backends, and
  // torch has no headers for the classes of these backends.
  const py::gil_scoped_acquire gil;
  const py::object make = py::module_::import("torch_sagellm._private.register").attr("part");
  const py::object made =
      make(options, c10::make_intrusive<c10d::PrefixStore>(prefix, store_), mine - ranks.begin(), ranks.size());
  auto child = made.cast<c10::intrusive_ptr<SageBackend>>();
  child->parents_device_ = bound_device();
  return child;
}

std::optional<c10::Device> SageBackend::bound_device() const {
  const auto own = getBoundDeviceId();
  return own ? own : parents_device_;
}

Vendors::Library SageBackend::bound_vendor() const {
  const auto device = bound_device();
  return device && is_accelerator(*device) ? vendors_.find(device->type()) : nullptr;
}

c10::intrusive_ptr<c10d::Backend> SageBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  for (const int rank : ranks) {
    if (rank < 0 || rank >= getSize()) {
      value_error("split", c10::str("rank is ", rank, ", expected 0 to ", getSize() - 1));
    }
  }
  if (const auto same = splits_.again(store)) return *same;
  const uint64_t turn = splits_.next();
  const auto device = bound_device();
  const std::vector<uint32_t> members = unsigned_ranks(ranks);
  const bool member = std::find(ranks.begin(), ranks.end(), getRank()) != ranks.end();
  c10::intrusive_ptr<SageBackend> child;
  Vendors::Library parents;
  Vendors::Library childs;
  bool can = false;
  std::exception_ptr failed;
  try {
    // The prefix leaves out the new group's name: before torch 2.15, ranks that were in no new group of an earlier
    // split number the names of later groups differently.
    const std::string prefix = c10::str("sagellm/split/", turn, "/", c10::Join(",", ranks));
    if (member) child = part(prefix, ranks, opts, c10::str(options_->group_name, " split ", turn));
    parents = bound_vendor();
    if (parents && child) childs = child->vendors_.find(device->type());
    // The pending operations must end first.
    can = parents && (!member || childs) && parents->can_split(*device, members) && parents->drain(options_->timeout);
  } catch (const std::exception&) {
    failed = std::current_exception();
    if (is_interrupt(failed)) throw;  // Ctrl-C ends the call without waiting for other ranks
  }
  // A rank that failed votes no instead of not voting, because the other ranks wait for its vote.
  if (device && is_accelerator(*device) && agree(can)) parents->split(*device, members, childs.get());
  if (failed) std::rethrow_exception(failed);
  splits_.keep(store, child);
  return child;
}

c10::intrusive_ptr<c10d::Backend> SageBackend::shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                                                      const c10::intrusive_ptr<c10d::Backend::Options>& opts_override) {
  if (shrink_flags != 0 && shrink_flags != kShrinkAbort) {
    value_error("shrink", c10::str("shrink_flags is ", shrink_flags, ", expected 0, or ", kShrinkAbort, " to abort"));
  }
  std::vector<uint32_t> excluded;
  for (const int64_t rank : ranks_to_exclude) {
    if (rank < 0 || rank >= getSize()) {
      value_error("shrink", c10::str("an excluded rank is ", rank, ", expected 0 to ", getSize() - 1));
    }
    if (rank == getRank()) value_error("shrink", c10::str("rank ", rank, " calls it, and is to be excluded"));
    excluded.push_back(static_cast<uint32_t>(rank));
  }
  std::vector<int> ranks;
  for (int rank = 0; rank < getSize(); ++rank) {
    if (std::find(excluded.begin(), excluded.end(), static_cast<uint32_t>(rank)) == excluded.end()) {
      ranks.push_back(rank);
    }
  }
  const auto vendor = bound_vendor();
  const bool aborts = shrink_flags == kShrinkAbort;
  std::optional<DevicesRetired> parent;
  // This thread itself aborts the operations, so their error is not raised in it.
  if (aborts) events_->told();
  // The communicator is retired before the group is aborted, so that the code which handles the group's failure does
  // not abort the communicator. Without the abort flag, pending operations may end first.
  if (vendor && (aborts || vendor->drain(options_->timeout))) parent.emplace(vendor->retire(*bound_device(), !aborts));
  if (aborts) abort_for(c10::str("shrink() was called on rank ", getRank()));
  const std::string without = c10::Join(",", ranks_to_exclude);
  const auto* const ours = dynamic_cast<const Options*>(opts_override.get());
  const std::string attempt = ours != nullptr && !ours->attempt.empty() ? "/" + ours->attempt : "";
  auto child = part(c10::str("sagellm/shrink/", c10::Join(",", ranks), attempt), ranks, opts_override,
                    c10::str(options_->group_name, " without ", without));
  if (vendor) {
    const auto own = child->vendors_.find(bound_device()->type());
    if (child->agree(own && parent && parent->can_shrink))
      own->shrink_from(*parent->communicator, *bound_device(), excluded);
  }
  return child;
}

}  // namespace sagellm
