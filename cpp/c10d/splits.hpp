// The groups that were split off a group. torch calls `split` once for each type of device that the backend serves
// (2.15 does so only on ranks outside of the new group). It passes the same store each time, and expects the same new
// backend.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include "compat.hpp"

namespace sagellm {

class Splits {
 public:
  using Store = c10::intrusive_ptr<c10d::Store>;
  using Child = c10::intrusive_ptr<c10d::Backend>;

  // If the last split was called with this store, returns what that split made, which is null on a rank that is in no
  // new group. If the store is a different one, returns no value, because this is a new split.
  std::optional<Child> again(const Store& store) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return store == store_ ? std::optional<Child>(child_) : std::nullopt;
  }
  // Number of the split that begins; equal on all ranks.
  uint64_t next() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return count_++;
  }
  // Keeps the result of a split until the next split or `clear`. The last reference to the previous result is dropped
  // after the lock is released.
  void keep(const Store& store, Child child) {
    const std::lock_guard<std::mutex> lock(mutex_);
    store_ = store;
    child_.swap(child);
  }
  void clear() { keep(nullptr, nullptr); }

 private:
  // Guards the fields below.
  std::mutex mutex_;
  Store store_;
  Child child_;
  uint64_t count_ = 0;
};

}  // namespace sagellm
