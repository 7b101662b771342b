// The options of one group, as a program passes them. `Options` in `_C.pyi` says what they mean to the program.
#pragma once

#include <chrono>
#include <cstdint>
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

  // "auto", or "delegate" to have torch's own backend serve the group even if shared memory could.
  std::string engine = "auto";
  // torch's built-in backend that serves what the engine cannot. The Python package reads it and makes the delegate.
  std::string delegate = "gloo";
  // Rules that assign algorithms to operations, in the syntax of src/select/rules.rs. They have priority over the rules
  // of the environment.
  std::string algorithm;
  // The user's description of the machines, as `Topology` of src/select/start.rs parses it; empty if there is none.
  std::string topology;
  // Must be equal on all ranks of a group over several hosts. `fusion`: small operations that are pending at the same
  // time are sent together. `strict`: between hosts, elements are combined in rank order, so the bits of a result are
  // the same as on one host.
  bool fusion = true;
  bool strict = false;
  // Whether the link between hosts is measured when the group is made. If not, the start rules of src/select/start.rs
  // choose the algorithms between hosts. Rank 0's value applies to the whole group.
  bool measure_link = true;
  // Whether large tensors are combined and broadcast by NUMA node, or by last-level cache if all ranks are on one node,
  // where many ranks are bound to these. The value of the first rank of each host applies to that host.
  bool numa = false;
  // Largest number of threads that copy and combine for a thread of this rank. 0: as many as torch's intra-op
  // threads, but all ranks of the host together use at most one thread per core.
  int64_t threads = 0;
  // Whether this process was forked from one that had imported torch. GNU's OpenMP hangs in such a child if its parent
  // has used threads, so in such a child the calling thread copies and combines alone. Set by the Python package.
  bool forked = false;
  // Whether ranks compare hashes of the results that should be equal on all ranks: "off", "sampled" or "all"; ":warn"
  // may follow the last two. Rank 0's value applies to the whole group.
  std::string verify = "off";
  // Number of connections to each process on another host. The Python package reads it. Two processes use the smaller
  // of their two numbers. All their groups share the connections of their first group.
  int64_t links = 1;
  // What carries tensors on a device: "auto"; "host" for copies through host memory; a vendor's library by its name; or
  // a library by name and file ("name:/path/to/lib.so").
  std::string vendor = "auto";
  // How the program learns that a call on a device has failed if no thread waits for the call: "raise", "exit" or
  // "none". This and `blocking_wait` are local to the rank.
  std::string on_device_failure = "raise";
  // If true, `wait()` of a call on a device blocks the host until the call has ended, and throws if the call failed.
  bool blocking_wait = false;
  // Folders that are searched for libraries, besides the usual places.
  std::vector<std::string> library_folders;
  // The program asked for the group under gloo's name, so a list of tensors has the meaning that gloo gives it.
  bool as_gloo = false;
  // Seconds after which a log line reports a pending operation; 0 means never. Without a value the setting of the
  // process applies. Local to this rank.
  std::optional<double> soft_timeout;
  // Set in the options of a shrink. Ranks meet only ranks with the same attempt.
  std::string attempt;
  // Addresses at which other ranks reach this process; see src/rendezvous/addresses.rs. Set by the Python package.
  std::string addresses;
};

}  // namespace sagellm
