// Carries tensors on a device that has no library: they are copied to host memory, moved or combined there by the CPU's
// engine or by a delegate, and copied back.
//
// The engine cannot directly use the memory of such tensors, nor that of strided tensors. Temporaries in host memory
// replace them (lower/plan.hpp); the core decides when the temporaries are filled and copied back. So the core keeps
// calls on the same memory in order, and a call has ended when its results are on the device. A delegate gets copies in
// place of the tensors (c10d/delegate.cpp).
//
// Streams: issuing a call waits for the work on this rank's current stream, never for another rank. That work is then
// done, so copies may be made later, on a stream of the group, by any thread that drives the operation. The copies wait
// for the device, so work that is enqueued after the end of the call finds the results, on any stream.
#pragma once

#include <atomic>

#include "c10d/options.hpp"
#include "c10d/vendors.hpp"
#include "device/streams.hpp"

namespace sagellm {

class Staging {
 public:
  Staging(const BackendOptions& options, const Vendors& vendors) : options_(options), vendors_(vendors) {}

  // Waits until the work that is now on the caller's stream has run. Rejects a stream that is being captured.
  void wait_for_stream(const char* op, c10::Device device);
  // The stream for copies from and to the device.
  c10::Stream stream(c10::Device device) { return streams_.side(device); }

 private:
  // Logs the group's first call through host memory, as a warning if it is the process's first such call.
  void tell_once(c10::Device device);

  const BackendOptions& options_;
  const Vendors& vendors_;
  DeviceStreams streams_;
  std::atomic<bool> told_{false};
};

}  // namespace sagellm
