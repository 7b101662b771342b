#include "device/staging.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "host/errors.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

Staging::Staging(std::string group, std::string vendor) : group_(std::move(group)), vendor_(std::move(vendor)) {}

std::string Staging::reason(c10::DeviceType type) const {
  if (vendor_ == "host") return "the option vendor=\"host\" asks for it";
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = reasons_.find(type);
  if (found != reasons_.end()) return found->second;
  return c10::str("this build has no engine for ", c10::DeviceTypeName(type, true), " devices");
}

void Staging::set_reason(c10::DeviceType type, const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  reasons_[type] = why;
}

void Staging::tell(c10::Device device) {
  static std::atomic<bool> warned{false};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (told_) return;
    told_ = true;
  }
  constexpr uint8_t kWarning = 2;
  constexpr uint8_t kInfo = 3;
  const std::string text = c10::str("group ", group_, ": tensors on ", device,
                                    " travel through host memory, which is slow: they are copied to the host and back, "
                                    "and the host waits for the device; because ",
                                    reason(device.type()));
  log_line(warned.exchange(true) ? kInfo : kWarning, text);
}

void Staging::forget_settled() {
  under_way_.erase(
      std::remove_if(under_way_.begin(), under_way_.end(), [](const auto& each) { return each->settled(); }),
      under_way_.end());
}

std::vector<std::shared_ptr<Transfer>> Staging::enter(const std::shared_ptr<Transfer>& transfer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  forget_settled();
  std::vector<std::shared_ptr<Transfer>> earlier;
  for (const auto& each : under_way_) {
    if (each->precedes(*transfer)) earlier.push_back(each);
  }
  under_way_.push_back(transfer);
  return earlier;
}

std::vector<std::shared_ptr<Transfer>> Staging::collectives() {
  const std::lock_guard<std::mutex> lock(mutex_);
  forget_settled();
  std::vector<std::shared_ptr<Transfer>> found;
  for (const auto& each : under_way_) {
    if (each->kind == Transfer::Kind::kCollective) found.push_back(each);
  }
  return found;
}

std::shared_ptr<Transfer> Staging::begin(const char* op, c10::Device device, std::vector<Transfer::Pair> pairs,
                                         Transfer::Kind kind) {
  const c10::Stream stream = current_stream(device);
  // Where torch cannot say, the copy to the host fails in the runtime's own words.
  if (capture_of(stream).value_or(false)) {
    value_error(op,
                c10::str("the current stream of ", device,
                         " is being captured into a graph, which cannot hold a call that travels through host memory (",
                         reason(device.type()), "); make the call outside of the capture"));
  }
  tell(device);
  DeferredRelease::instance().release();
  const bool barrier = pairs.empty();
  auto transfer = std::make_shared<Transfer>(device, std::move(pairs), kind, streams_);
  // A barrier comes behind what this rank's stream holds.
  if (barrier) c10::impl::VirtualGuardImpl(device.type()).synchronizeStream(stream);
  return transfer;
}

}  // namespace sagellm
