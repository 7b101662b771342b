#include "host/link.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "host/python_host.hpp"

namespace sagellm {

namespace {

// More would overflow gloo's clock arithmetic.
constexpr uint64_t kLongest = 1000ULL * 3600 * 24 * 20;

class GlooInFlight final : public InFlight {
 public:
  explicit GlooInFlight(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}

  void wait(uint64_t timeout_ms) override {
    // 0 would mean "as long as the group says".
    const auto timeout = std::chrono::milliseconds(std::clamp<uint64_t>(timeout_ms, 1, kLongest));
    if (!plain_errors([&] { return work_->wait(timeout); })) throw std::runtime_error("the wait was broken off");
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace

GlooLink::GlooLink(c10::intrusive_ptr<c10d::Backend> group) : group_(std::move(group)) {}

std::unique_ptr<InFlight> GlooLink::transfer(bool sends, uint32_t peer, uint32_t tag, uint8_t* memory,
                                             size_t bytes) const {
  std::vector<at::Tensor> tensors{at::from_blob(memory, {static_cast<int64_t>(bytes)}, at::kByte)};
  return plain_errors([&] {
    const auto other = static_cast<int>(peer);
    const auto group = this->group();
    return std::make_unique<GlooInFlight>(sends ? group->send(tensors, other, static_cast<int>(tag))
                                                : group->recv(tensors, other, static_cast<int>(tag)));
  });
}

// gloo offers no such call, but closes every connection of a context when one of its waits elapses. A group has a
// context for each of its devices and takes the one that the tag says; a connection that is broken already cannot be
// waited on.
void GlooLink::cut() const noexcept {
  constexpr int kMostDevices = 4;
  // The core uses tags below 4 and from 2^30 on; these are neither.
  constexpr int kUnusedTag = 1 << 20;
  try {
    const auto group = this->group();
    std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
    for (int tag = kUnusedTag; tag < kUnusedTag + kMostDevices; ++tag) {
      for (int peer = 0; peer < group->getSize(); ++peer) {
        if (peer == group->getRank()) continue;
        c10::intrusive_ptr<c10d::Work> work;
        try {
          work = group->recv(nothing, peer, tag);
        } catch (const std::exception&) {
          continue;
        }
        try {
          work->wait(std::chrono::milliseconds(1));
        } catch (const std::exception&) {
          break;  // That is the point.
        }
      }
    }
  } catch (const std::exception&) {
    // It is closed already.
  }
}

void GlooLink::close() {
  c10::intrusive_ptr<c10d::Backend> group;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    group.swap(group_);
  }
  if (group) group->shutdown();
}

c10::intrusive_ptr<c10d::Backend> GlooLink::group() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!group_) throw std::runtime_error("the link is closed");
  return group_;
}

}  // namespace sagellm
