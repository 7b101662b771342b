// The options of one group, as a program passes them (`Options` of `_C.pyi` says what they mean to it).
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "compat.hpp"

namespace sagellm {

struct BackendOptions final : c10d::Backend::Options {
  explicit BackendOptions(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options("sagellm", timeout) {}

  c10::intrusive_ptr<BackendOptions> copy() const { return c10::make_intrusive<BackendOptions>(*this); }
#ifdef SAGELLM_HAS_OPTIONS_CLONE
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override { return copy(); }
#endif

  // "auto", or "delegate" to serve the group by torch's own backend although shared memory would do.
  std::string engine = "auto";
  // The built-in backend that serves what the engine cannot. Read by the Python package, which makes it.
  std::string delegate = "gloo";
  // Rules that assign algorithms to operations, in the syntax of src/select/rules.rs; they come before those of the
  // environment.
  std::string algorithm;
  // What the user says about the machines, as `Topology` of src/select/start.rs reads it; empty where the user says
  // nothing.
  std::string topology;
  // For groups whose ranks live on several hosts: small operations that wait anyway travel together; every element is
  // combined in the order of the ranks, which gives the bits of one host. The same on all ranks.
  bool fusion = true;
  bool strict = false;
  // Whether the link between hosts is measured when the group is made; if not, the start rules of src/select/start.rs
  // choose the algorithms between them. Rank 0's value holds for the group.
  bool measure_link = true;
  // What carries tensors on a device: "auto"; "host" for copies through host memory; a vendor's library by its name,
  // or by name and file ("name:/path/to/lib.so").
  std::string vendor = "auto";
  // How the program is told of a failed call on a device for which no thread waits: "raise", "exit" or "none". Local
  // to this rank, as is the next.
  std::string on_device_failure = "raise";
  // `wait()` of a call on a device blocks the host until the call has ended, and throws where it failed.
  bool blocking_wait = false;
  // Where to look for libraries besides the usual places.
  std::vector<std::string> library_folders;
  // The program asked for the group under gloo's name: a list of tensors means what it means in gloo.
  bool as_gloo = false;
  // Seconds after which a line of the log reports a pending operation, 0 for none; without a value that of the
  // process. Local to this rank.
  std::optional<double> soft_timeout;
  // Set in the options of a shrink: ranks meet only ranks with the same attempt.
  std::string attempt;
  // Where other ranks reach this process; see src/rendezvous/addresses.rs. Filled by the Python package.
  std::string addresses;
};

}  // namespace sagellm
