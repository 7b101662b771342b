#include "work/joined.hpp"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "work/work.hpp"

namespace sagellm {

JoinedWork::JoinedWork(int rank, c10d::OpType type, std::vector<WorkPtr> parts)
    : c10d::Work(rank, type), parts_(std::move(parts)) {}

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
  const WaitLimit limit(timeout);
  bool well = true;
  for (const auto& part : parts_) well = part->wait(limit.left()) && well;
  return well;
}

void JoinedWork::synchronize() {
  for (const auto& part : parts_) part->synchronize();
}

std::vector<at::Tensor> JoinedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& part : parts_) {
    for (at::Tensor& tensor : part->result()) all.push_back(std::move(tensor));
  }
  return all;
}

c10::intrusive_ptr<c10::ivalue::Future> JoinedWork::getFuture() {
  using c10::ivalue::Future;
  const std::lock_guard<std::mutex> lock(value_mutex_);
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
  // Each part's callback decrements this count, on whichever thread runs the callback. The last callback sees what all
  // others wrote.
  const auto left = std::make_shared<std::atomic<size_t>>(values.size());
  for (const auto& value : values) {
    value->addCallback([left, values, all = value_](Future&) {
      if (left->fetch_sub(1, std::memory_order_acq_rel) > 1) return;
      c10::List<at::Tensor> tensors;
      for (const auto& each : values) {
        if (each->hasError()) return all->setError(each->exception_ptr());
        // The future is already complete. This wait makes the current streams wait for its value.
        each->wait();
        for (const at::Tensor& tensor : each->value().toTensorVector()) tensors.push_back(tensor);
      }
      all->markCompleted(c10::IValue(std::move(tensors)));
    });
  }
  return value_;
}

}  // namespace sagellm
