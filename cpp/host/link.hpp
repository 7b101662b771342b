// torch's gloo group as a way to ranks on other hosts.
#pragma once

#include <memory>
#include <mutex>

#include "compat.hpp"
#include "host/host.hpp"

namespace sagellm {

class GlooLink final : public Link {
 public:
  // A gloo group over the same ranks that is used for nothing else: all its tags are ours, and it can be cut.
  explicit GlooLink(c10::intrusive_ptr<c10d::Backend> group);

  std::unique_ptr<InFlight> transfer(bool sends, uint32_t peer, uint32_t tag, uint8_t* memory,
                                     size_t bytes) const override;
  void cut() const noexcept override;

  // Drops the group: a gloo group that lives into the exit of the process sometimes fails there.
  void close();

 private:
  c10::intrusive_ptr<c10d::Backend> group() const;

  mutable std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> group_;
};

}  // namespace sagellm
