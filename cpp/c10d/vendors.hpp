// The vendors' libraries that carry a group's tensors on devices, one for each type of device.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "c10d/options.hpp"
#include "device/vendor.hpp"

namespace sagellm {

class Vendors {
 public:
  using Library = std::shared_ptr<VendorDevices>;

  // `owner` returns what the libraries need from the group.
  Vendors(c10::intrusive_ptr<BackendOptions> options, std::function<DeviceOwner()> owner)
      : options_(std::move(options)), owner_(std::move(owner)) {}

  // Returns the library for devices of a type, or null if tensors on these devices go through host memory. Searches
  // only once. Throws if the user named a library that cannot be used.
  Library find(c10::DeviceType type) const;
  // Why tensors on devices of this type go through host memory.
  std::string missing(c10::DeviceType type) const;
  // Returns the libraries that `find` has opened.
  std::vector<Library> opened() const;
  // Returns these libraries and forgets them, so a later `find` searches again.
  std::vector<Library> take();

 private:
  // The library for one type of device or, if it is null, why there is none.
  struct Found {
    Library library;
    std::string missing;
  };
  static std::vector<Library> libraries(const std::map<c10::DeviceType, Found>& found);

  const c10::intrusive_ptr<BackendOptions> options_;
  const std::function<DeviceOwner()> owner_;
  // Guards `found_`. Also held during the search for a library, which waits for no other rank.
  mutable std::mutex mutex_;
  mutable std::map<c10::DeviceType, Found> found_;
};

// Closes these libraries, each within the timeout. After the first exception it aborts the remaining libraries instead,
// and throws that exception at the end.
void close_all(const std::vector<Vendors::Library>& libraries, std::chrono::milliseconds timeout);

}  // namespace sagellm
