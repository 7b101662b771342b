// What is done to tensors on a device beside the call of the vendor's library, as the core says
// (src/engine/device/lowering.rs and layout.rs). Runs on the current stream, through torch's own operators, and waits
// for nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lower/plan.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

// False where the device stores the tensor in a format that only its own operators can read.
bool is_dense(const at::Tensor& tensor);

// A call as the core is asked for it. `dense`: of all its tensors.
DeviceRequest request(const Plan& plan, bool dense);

// The tensors of one call, between the caller's memory and the library's.
class Preparation {
 public:
  Preparation(const Plan& plan, const DeviceLowering& lowering, int ranks, c10::Device device);

  // Does what comes before the library's call; temporaries are added to `keep`, to live until the device has passed
  // the call.
  DevicePlaced prepare(std::vector<at::Tensor>& keep);
  // Puts what came out where the caller wants it.
  void store() const;

 private:
  // `numbers` after the steps. `factor` is undefined where the steps say it.
  at::Tensor applied(at::Tensor numbers, const rust::Vec<Local>& steps, const at::Tensor& factor = {}) const;
  at::Tensor gathered() const;

  const Plan& plan_;
  const DeviceLowering& lowering_;
  const int ranks_;
  const c10::Device device_;
  // Of the caller's tensors.
  const at::ScalarType type_;
  // The temporary in which the result arrives; undefined where it arrives in the caller's memory.
  at::Tensor received_;
};

}  // namespace sagellm
