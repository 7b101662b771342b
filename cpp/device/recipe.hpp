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

// A call of the library.
struct Launch {
  rust::Box<RustRecipe> recipe;
  RecipeFacts facts;
  uint32_t root;
  // Where the factor of the library's own PREMUL_SUM lies on the device, or 0.
  size_t factor = 0;
  Pieces send;
  Pieces recv;
  bool is_message() const { return facts.kind >= static_cast<uint8_t>(Kind::kSend); }
  rust::Box<RustLaunched> on(const rust::Box<RustMember>& member, size_t stream) const;

  // Puts what came out where the caller wants it; null where it is there.
  std::function<void()> after;
};

// A tensor over memory of a device that somebody else keeps alive.
at::Tensor at_address(size_t address, at::IntArrayRef sizes, at::ScalarType type, c10::Device device);

// False for memory in a format of its own, which only the device's operators can read.
bool elements_in_order(const at::Tensor& tensor);

// What the library is asked for a call, in words of all ranks.
DeviceAsked asked(const Plan& plan, int ranks, bool plain);

// Does what comes before the library's call; temporaries are added to `keep`, to live until the device has passed the
// call.
Launch prepare(const Plan& plan, rust::Box<RustRecipe> recipe, int ranks, c10::Device device,
               std::vector<at::Tensor>& keep);

}  // namespace sagellm
