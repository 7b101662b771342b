// Between the caller's memory on a device and what a vendor's library is called with: what a recipe of the core
// (src/engine/device/lowering.rs) says must be done to tensors before and after. Runs on the current stream, through
// torch's own operators, and waits for nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "lower/plan.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

using Pieces = std::vector<Piece>;

// What the library is given for a call.
struct Launch {
  // Where the factor of the library's own PREMUL_SUM lies on the device, or 0.
  size_t factor = 0;
  Pieces send;
  Pieces recv;
  // Puts what came out where the caller wants it; null where it is there.
  std::function<void()> after;
};

// A tensor over memory of a device that somebody else keeps alive.
at::Tensor at_address(size_t address, at::IntArrayRef sizes, at::ScalarType type, c10::Device device);

// False for memory in a format of its own, which only the device's operators can read.
bool elements_in_order(const at::Tensor& tensor);

// A call as the core is asked for it. `plain`: its tensors' memory is their elements in order.
DeviceRequest request(const Plan& plan, bool plain);

// Does what comes before the library's call; temporaries are added to `keep`, to live until the device has passed the
// call.
Launch prepare(const Plan& plan, const DeviceRecipe& how, int ranks, c10::Device device, std::vector<at::Tensor>& keep);

}  // namespace sagellm
