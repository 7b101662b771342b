#include "c10d/region.hpp"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <utility>

#include "host/errors.hpp"

namespace sagellm {

void Region::start() {
  if (open_.load(std::memory_order_relaxed)) {
    value_error("start_coalescing", "a region of this group is open already; end it first");
  }
  content_ = Content();
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
  open_.store(false, std::memory_order_relaxed);
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
  using std::chrono::milliseconds;
  using std::chrono::steady_clock;
  // One time for all parts, where one is given.
  const bool bounded = timeout > kNoTimeout;
  const auto until = steady_clock::now() + timeout;
  for (const auto& part : parts_) {
    if (bounded) {
      // Rounded up: no time at all would mean no limit.
      const auto left = std::chrono::ceil<milliseconds>(until - steady_clock::now());
      timeout = std::max(left, milliseconds(1));
    }
    part->wait(timeout);
  }
  return true;
}

void JoinedWork::synchronize() {
  for (const auto& part : parts_) part->synchronize();
}

void JoinedWork::abort() {
  for (const auto& part : parts_) part->abort();
}

c10::intrusive_ptr<c10::ivalue::Future> JoinedWork::getFuture() {
  using c10::ivalue::Future;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (value_) return value_;
  std::vector<c10::intrusive_ptr<Future>> values;
  std::vector<c10::Device> devices;
  for (const auto& part : parts_) {
    values.push_back(part->getFuture());
    for (const c10::Device device : values.back()->devices()) {
      if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
    }
  }
  value_ = c10::make_intrusive<Future>(c10::ListType::ofTensors(), devices);
  if (values.empty()) value_->markCompleted(c10::IValue(c10::List<at::Tensor>()));
  // Counted down by each part's callback, whichever thread runs it; the last one sees what all others left behind.
  const auto left = std::make_shared<std::atomic<size_t>>(values.size());
  for (const auto& value : values) {
    value->addCallback([left, values, all = value_](Future&) {
      if (left->fetch_sub(1, std::memory_order_acq_rel) > 1) return;
      c10::List<at::Tensor> tensors;
      for (const auto& each : values) {
        if (each->hasError()) return all->setError(each->exception_ptr());
        // Complete already: this puts the current streams behind it.
        each->wait();
        for (const at::Tensor& tensor : each->value().toTensorVector()) tensors.push_back(tensor);
      }
      all->markCompleted(c10::IValue(std::move(tensors)));
    });
  }
  return value_;
}

std::vector<at::Tensor> JoinedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& part : parts_) {
    for (at::Tensor& tensor : part->result()) all.push_back(std::move(tensor));
  }
  return all;
}

}  // namespace sagellm
