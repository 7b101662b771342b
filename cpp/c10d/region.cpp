#include "c10d/region.hpp"

#include <algorithm>
#include <utility>

#include "host/errors.hpp"

namespace sagellm {

void Region::start() {
  if (open_.load(std::memory_order_relaxed)) {
    value_error("start_coalescing", "a region of this group is open already; end it first");
  }
  content_ = Content();
  refused_ = nullptr;
  thread_ = std::this_thread::get_id();
  open_.store(true, std::memory_order_relaxed);
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
    const bool own = thread_ == std::this_thread::get_id();
    if (own && refused_) std::rethrow_exception(std::exchange(refused_, nullptr));
    value_error("end_coalescing", "this thread has no open region of this group; start one first");
  }
  open_.store(false, std::memory_order_relaxed);
  return std::exchange(content_, Content());
}

void Region::refuse(std::exception_ptr why) {
  refused_ = std::move(why);
  content_ = Content();
  open_.store(false, std::memory_order_relaxed);
}

void Region::drop() {
  if (thread_ == std::this_thread::get_id()) refuse(nullptr);
}

}  // namespace sagellm
