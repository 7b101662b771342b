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
  for (const Pair& pair : pairs_) {
    if (pair.device.numel() == 0) continue;
    touched_.push_back(runs_of(pair.device, pair.stored));
    if (pair.stored) written_.push_back(touched_.back());
  }
}

void Transfer::begin() {
  begin_event_.record(current_stream(device));
}

void Transfer::fetch() {
  const std::lock_guard<std::mutex> lock(copy_mutex_);
  const c10::DeviceGuard guard(device);
  for (const Pair& pair : pairs_) {
    if (pair.fetched) copy_quietly(pair.host, pair.device);
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
      if (pair.stored) copy_quietly(pair.device, pair.host);
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
  const bool near = std::any_of(written_.begin(), written_.end(), [&](const Strided& mine) {
    return std::any_of(other.touched_.begin(), other.touched_.end(),
                       [&](const Strided& theirs) { return overlap(hull(mine), hull(theirs)); });
  });
  return near &&
         RustOp::memory_meets({written_.data(), written_.size()}, {other.touched_.data(), other.touched_.size()});
}

// ------------------------------------------------------------------------------------------------ the Work

StagedWork::StagedWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Events> events,
                       std::unique_ptr<Trace> trace, std::shared_ptr<Transfer> transfer,
                       std::chrono::milliseconds timeout)
    : SageWork(rank, type, std::move(outputs), std::move(events), std::move(trace)),
      transfer_(std::move(transfer)),
      timeout_(timeout) {
  devices_ = {transfer_->device};
}

void StagedWork::ended(std::exception_ptr failure) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (taken_) return;
    taken_ = true;
  }
  if (!failure) {
    try {
      transfer_->store_earlier();
      transfer_->store();
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
  }
  std::string text = own_ ? own_->failure() : std::string();
  if (failure && text.empty()) text = coded_text(failure);
  auto tensors = transfer_->settle();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_at_ = std::chrono::steady_clock::now();
    exception_ = std::move(failure);
    text_ = text;
    completed_ = true;
  }
  cv_.notify_all();
  finish(text);
  Graveyard::instance().bury(c10::intrusive_ptr<StagedWork>::reclaim_copy(this), std::move(tensors));
}

bool StagedWork::done() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_;
}

std::string StagedWork::error() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return text_;
}

std::exception_ptr StagedWork::exception() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return exception_;
}

std::chrono::nanoseconds StagedWork::duration() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ended_at_ - began_;
}

std::vector<Explanation> StagedWork::explain() const {
  return own_ ? own_->explain() : std::vector<Explanation>();
}

void StagedWork::on_result_stream(const std::function<void()>& body) const {
  const c10::DeviceGuard guard(transfer_->device);
  const c10::StreamGuard on(transfer_->side());
  body();
}

bool StagedWork::wait(std::chrono::milliseconds timeout) {
  const auto began = std::chrono::steady_clock::now();
  if (own_ && !done()) {
    std::exception_ptr failure;
    try {
      own_->wait(timeout);
    } catch (const std::exception&) {
      // An elapsed wait and Python's signals are the caller's alone.
      if (!own_->isCompleted() || own_->isSuccess()) throw;
      failure = std::current_exception();
    }
    // On this thread, unless a callback thread was faster.
    ended(failure);
  }
  if (timeout.count() > 0) {
    const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - began);
    timeout = std::max(timeout - passed, std::chrono::milliseconds(1));
  }
  sleep_until_completed(timeout);
  transfer_->order(current_stream(transfer_->device));
  Graveyard::instance().drain();
  return true;
}

}  // namespace sagellm
