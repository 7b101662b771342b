// The groups that were split off a group. torch calls `split` once for each type of device that the backend serves
// (2.15 only on ranks outside of the new group), each time with the same store, and expects the same new backend.
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

  // What the last split made, where it was called with this store: null on a rank that is in no new group. No value:
  // this is another split.
  std::optional<Child> again(const Store& store) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return store == store_ ? std::optional<Child>(child_) : std::nullopt;
  }
  // The number of a split that begins; the same on all ranks.
  uint64_t next() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return count_++;
  }
  // Keeps what a split has made, until the next one or `clear`. The last reference to the one before is dropped without
  // the lock.
  void keep(const Store& store, Child child) {
    const std::lock_guard<std::mutex> lock(mutex_);
    store_ = store;
    child_.swap(child);
  }
  void clear() { keep(nullptr, nullptr); }

 private:
  // Guards the fields.
  std::mutex mutex_;
  Store store_;
  Child child_;
  uint64_t count_ = 0;
};

}  // namespace sagellm
