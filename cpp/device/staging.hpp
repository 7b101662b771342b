// Tensors on a device, carried by the engine of the CPU: fetched into host memory, moved or combined there, stored
// back.
//
// In the description of the call, copies in host memory take the places of its tensors; it is then lowered, or handed
// to a delegate, like any other (`SageBackend::through_host`). So every kind of call, over every engine and delegate,
// has one way through host memory.
//
// What is promised about streams: inputs are what the caller's stream has made of them at the call, and results are not
// stored before what it held then has run. A synchronous call returns when the results are on the device. An
// asynchronous one waits at the call for the caller's stream of this rank, never for another rank; its results are
// stored when they are there, on a stream of the group's, whether anyone waits or not; and `wait` puts the caller's
// stream behind them.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/streams.hpp"
#include "device/transfer.hpp"

namespace sagellm {

// The staged calls of one backend that are under way, and what it says about staging.
class Staging {
 public:
  // `why` names what was looked for and not found; `group` is for messages.
  Staging(std::string group, std::string vendor);

  // Why tensors of this kind of device go through host memory.
  std::string reason(c10::DeviceType type) const;
  void set_reason(c10::DeviceType type, const std::string& why);
  // The first step of a call, before anything is copied, on its caller's thread.
  std::shared_ptr<Transfer> begin(const char* op, c10::Device device, std::vector<Transfer::Pair> pairs,
                                  Transfer::Kind kind);
  // Enters a call and returns the earlier ones that must have stored their results before it reads or stores.
  std::vector<std::shared_ptr<Transfer>> enter(const std::shared_ptr<Transfer>& transfer);
  // The collectives under way, whose results a barrier comes behind.
  std::vector<std::shared_ptr<Transfer>> collectives();

 private:
  // The first staged call of a group is told of, that of a process as a warning.
  void tell(c10::Device device);
  void forget_settled();

  const std::string group_;
  const std::string vendor_;
  const std::shared_ptr<DeviceStreams> streams_ = std::make_shared<DeviceStreams>();

  mutable std::mutex mutex_;
  std::map<c10::DeviceType, std::string> reasons_;
  bool told_ = false;
  // In order of issue. A transfer leaves when a later call finds that it is settled.
  std::vector<std::shared_ptr<Transfer>> under_way_;
};

}  // namespace sagellm
