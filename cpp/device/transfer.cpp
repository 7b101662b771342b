#include "device/transfer.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "host/errors.hpp"
#include "host/python_host.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

// ------------------------------------------------------------------------------------------------ the copies

Transfer::Transfer(c10::Device on, std::vector<Pair> pairs, Kind of, std::shared_ptr<DeviceStreams> streams)
    : device(on),
      kind(of),
      streams_(std::move(streams)),
      pairs_(std::move(pairs)),
      begin_event_(on.type()),
      stored_event_(on.type()) {
  begin_event_.record(current_stream(device));
  for (const Pair& pair : pairs_) {
    if (pair.device.numel() == 0) continue;
    touched_.push_back(runs_of(pair.device, pair.stored));
    if (pair.stored) written_.push_back(touched_.back());
  }
}

void Transfer::fetch() {
  const std::lock_guard<std::mutex> lock(copy_mutex_);
  const c10::DeviceGuard guard(device);
  for (const Pair& pair : pairs_) {
    if (pair.fetched) copy_no_grad(pair.host, pair.device);
  }
}

void Transfer::fetch_late() {
  store_earlier();
  const c10::DeviceGuard guard(device);
  const c10::StreamGuard on(side());
  begin_event_.block(side());
  fetch();
}

void Transfer::store() {
  const std::lock_guard<std::mutex> lock(copy_mutex_);
  if (stored_) {
    if (store_failure_) std::rethrow_exception(store_failure_);
    return;
  }
  stored_ = true;
  try {
    const c10::DeviceGuard guard(device);
    const c10::StreamGuard on(side());
    begin_event_.block(side());
    for (const Pair& pair : pairs_) {
      if (pair.stored) copy_no_grad(pair.device, pair.host);
    }
    stored_event_.record(side());
  } catch (const std::exception&) {
    store_failure_ = std::current_exception();
    throw;
  }
}

void Transfer::set_after(std::vector<std::shared_ptr<Transfer>> earlier) {
  const std::lock_guard<std::mutex> lock(mutex_);
  after_ = std::move(earlier);
}

void Transfer::store_earlier() const {
  std::vector<std::shared_ptr<Transfer>> earlier;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    earlier = after_;
  }
  for (const auto& each : earlier) each->store();
}

std::vector<at::Tensor> Transfer::settle() {
  std::vector<at::Tensor> tensors;
  // Dropped without the lock.
  std::vector<std::shared_ptr<Transfer>> forgotten;
  {
    const std::lock_guard<std::mutex> copying(copy_mutex_);
    stored_ = true;
    for (Pair& pair : pairs_) {
      tensors.push_back(std::move(pair.device));
      tensors.push_back(std::move(pair.host));
    }
    pairs_.clear();
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    settled_ = true;
    forgotten.swap(after_);
  }
  changed_.notify_all();
  return tensors;
}

bool Transfer::settled() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return settled_;
}

void Transfer::wait_settled() const {
  std::unique_lock<std::mutex> lock(mutex_);
  // Its operation has a deadline, so this ends.
  while (!changed_.wait_for(lock, std::chrono::milliseconds(100), [this] { return settled_; })) {
    lock.unlock();
    if (check_interrupt()) std::rethrow_exception(take_interrupt());
    lock.lock();
  }
}

bool Transfer::precedes(const Transfer& other) const {
  // The core compares run by run, which is slow and rarely needed.
  const bool near = std::any_of(written_.begin(), written_.end(), [&](const Strided& mine) {
    return std::any_of(other.touched_.begin(), other.touched_.end(),
                       [&](const Strided& theirs) { return overlap(extent(mine), extent(theirs)); });
  });
  return near &&
         RustOp::memory_meets({written_.data(), written_.size()}, {other.touched_.data(), other.touched_.size()});
}

// ------------------------------------------------------------------------------------------------ the Work

StagedWork::StagedWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
                       std::unique_ptr<Trace> trace, std::shared_ptr<Transfer> transfer,
                       std::chrono::milliseconds timeout)
    : SageWork(rank, type, std::move(outputs), std::move(events), std::move(trace), Known{0, timeout}),
      transfer_(std::move(transfer)) {
  devices_ = {transfer_->device};
}

void StagedWork::carry(c10::intrusive_ptr<c10d::Work> inner) {
  inner_ = std::move(inner);
  CallbackPool::instance().post([self = c10::intrusive_ptr<StagedWork>::reclaim_copy(this)] {
    self->store(failure_of([&] { self->inner_->wait(kNoTimeout); }));
  });
}

void StagedWork::parts_ended() {
  CallbackPool::instance().post([self = c10::intrusive_ptr<StagedWork>::reclaim_copy(this)] { self->store(nullptr); });
}

void StagedWork::store(std::exception_ptr failure) {
  if (taken_.exchange(true)) return;
  std::string how = error();
  if (!failure && how.empty()) {
    failure = failure_of([this] {
      transfer_->store_earlier();
      transfer_->store();
    });
  }
  if (failure && how.empty()) how = coded_text(failure);
  auto tensors = transfer_->settle();
  end(how, failure);
  DeferredRelease::instance().add(c10::intrusive_ptr<StagedWork>::reclaim_copy(this), std::move(tensors));
}

void StagedWork::wait_for_end(const WaitLimit& limit) {
  if (!ops_.empty() && !has_ended()) {
    CallbackPool::about_to_block();
    try {
      wait_for_core(limit);
    } catch (const std::exception&) {
      // An elapsed wait and Python's signals are the caller's alone.
      if (!core_ended() || error().empty()) throw;
    }
    // On this thread, unless a callback thread was faster.
    store(nullptr);
  }
  SageWork::wait_for_end(limit);
}

void StagedWork::on_result_stream(const std::function<void()>& body) const {
  const c10::DeviceGuard guard(transfer_->device);
  const c10::StreamGuard on(transfer_->side());
  body();
}

}  // namespace sagellm
