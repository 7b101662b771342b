#include "region.hpp"

#include <algorithm>
#include <utility>

#include "errors.hpp"

namespace sagellm {

void Region::start() {
  if (open_.load(std::memory_order_relaxed)) {
    value_error("start_coalescing", "a region of this group is open already; end it first");
  }
  content_ = Content();
  thread_ = std::this_thread::get_id();
  open_.store(true, std::memory_order_relaxed);
}

void Region::add(std::vector<DevicePlan> calls, const Label& label, Tensors keep, Tensors outputs, c10::Device device) {
  if (content_.device.has_value() && *content_.device != device) {
    value_error("coalescing", c10::str("the region has tensors on ", *content_.device, " and on ", device,
                                       ", expected all on one device"));
  }
  content_.device = device;
  if (!content_.label) content_.label = label;
  for (DevicePlan& call : calls) {
    // The caller's plan ends with the call.
    content_.plans.push_back(*call.plan);
    call.plan = &content_.plans.back();
    content_.calls.push_back(std::move(call));
  }
  std::move(keep.begin(), keep.end(), std::back_inserter(content_.keep));
  std::move(outputs.begin(), outputs.end(), std::back_inserter(content_.outputs));
}

Region::Content Region::end() {
  open_.store(false, std::memory_order_relaxed);
  // A deque that is moved keeps its elements where they are.
  return std::exchange(content_, Content());
}

JoinedWork::JoinedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> parts)
    : c10d::Work(rank, c10d::OpType::COALESCED), parts_(std::move(parts)) {}

bool JoinedWork::isCompleted() {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isCompleted(); });
}

bool JoinedWork::isSuccess() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isSuccess(); });
}

std::exception_ptr JoinedWork::exception() const {
  for (const auto& part : parts_) {
    if (const auto found = part->exception()) return found;
  }
  return nullptr;
}

bool JoinedWork::wait(std::chrono::milliseconds timeout) {
  for (const auto& part : parts_) part->wait(timeout);
  return true;
}

void JoinedWork::synchronize() {
  for (const auto& part : parts_) part->synchronize();
}

void JoinedWork::abort() {
  for (const auto& part : parts_) part->abort();
}

std::vector<at::Tensor> JoinedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& part : parts_) {
    for (at::Tensor& tensor : part->result()) all.push_back(std::move(tensor));
  }
  return all;
}

}  // namespace sagellm
