// The steps on a device's tensors before and after the call of the vendor's library. The core decides which steps
// (src/engine/device/lowering.rs and layout.rs). They run on the current stream, through torch's own operators, and
// wait for nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lower/plan.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

// False if the device stores the tensor in a format that only its own operators can read.
bool is_dense(const at::Tensor& tensor);

// The core's request for a call. `dense`: all tensors of the call pass `is_dense`.
DeviceRequest request(const Plan& plan, bool dense);

// Copies the tensors of one call between the caller's memory and the library's temporaries.
class Preparation {
 public:
  Preparation(const Plan& plan, const DeviceLowering& lowering, int ranks, c10::Device device);

  // Runs the steps before the library's call. Adds the temporaries to `keep`, where they must stay until the device has
  // passed the call.
  DevicePlaced prepare(std::vector<at::Tensor>& keep);
  // Runs the steps after the library's call and copies the results into the caller's tensors.
  void store() const;

 private:
  // Applies the steps to `numbers`. If `factor` is undefined, a scaling step uses the factor that the step holds.
  at::Tensor applied(at::Tensor numbers, const rust::Vec<Local>& steps, const at::Tensor& factor = {}) const;
  at::Tensor gathered() const;

  const Plan& plan_;
  const DeviceLowering& lowering_;
  const int ranks_;
  const c10::Device device_;
  // Element type of the caller's tensors.
  const at::ScalarType type_;
  // The temporary that receives the result; undefined if the library writes the result to the caller's memory.
  at::Tensor received_;
};

}  // namespace sagellm
