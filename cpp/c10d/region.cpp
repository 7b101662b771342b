#include "c10d/region.hpp"

#include <algorithm>
#include <utility>

#include "host/errors.hpp"

namespace sagellm {

void Region::start() {
  if (!owner_.begin()) value_error("start_coalescing", "a region of this group is open already; end it first");
  content_ = Content();
  const std::lock_guard<std::mutex> lock(mutex_);
  refused_ = {};
}

void Region::add(c10::ArrayRef<Plan> plans, const Label& label, Tensors keep, Tensors outputs, c10::Device device) {
  if (content_.device.has_value() && *content_.device != device) {
    value_error("coalescing", c10::str("the region has tensors on ", *content_.device, " and on ", device,
                                       ", expected all on one device"));
  }
  content_.device = device;
  if (!content_.label) content_.label = label;
  content_.plans.insert(content_.plans.end(), plans.begin(), plans.end());
  std::move(keep.begin(), keep.end(), std::back_inserter(content_.keep));
  std::move(outputs.begin(), outputs.end(), std::back_inserter(content_.outputs));
}

Region::Content Region::end() {
  if (!open()) {
    if (const auto why = take_refused()) std::rethrow_exception(why);
    value_error("end_coalescing", "this thread has no open region of this group; start one first");
  }
  Content content = std::exchange(content_, Content());
  owner_.end();
  return content;
}

void Region::refuse(std::exception_ptr why) {
  content_ = Content();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    refused_ = {std::this_thread::get_id(), std::move(why)};
  }
  owner_.end();
}

void Region::drop() {
  if (open()) return refuse(nullptr);
  (void)take_refused();
}

std::exception_ptr Region::take_refused() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool own = refused_.thread == std::this_thread::get_id();
  return own ? std::exchange(refused_, {}).why : nullptr;
}

}  // namespace sagellm
