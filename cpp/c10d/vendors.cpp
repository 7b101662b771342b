#include "c10d/vendors.hpp"

#include <exception>

namespace sagellm {

Vendors::Library Vendors::find(c10::DeviceType type) const {
  const std::string& wanted = options_->vendor;
  if (wanted == "host") return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = found_.find(type);
  if (found != found_.end()) return found->second.library;
  const size_t colon = wanted.find(':');
  const std::string file = colon == std::string::npos ? "" : wanted.substr(colon + 1);
  Found made;
  try {
    made.library =
        std::make_shared<VendorDevices>(owner_(), type, wanted.substr(0, colon), file, options_->library_folders);
  } catch (const std::exception& error) {
    // A user who names a library gets that library or an error.
    if (wanted != "auto") throw;
    made.missing = error.what();
  }
  return found_.emplace(type, std::move(made)).first->second.library;
}

std::string Vendors::missing(c10::DeviceType type) const {
  if (options_->vendor == "host") return "the option vendor=\"host\" asks for it";
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = found_.find(type);
  if (found != found_.end() && !found->second.missing.empty()) return found->second.missing;
  return c10::str("this build has no engine for ", c10::DeviceTypeName(type, true), " devices");
}

std::vector<Vendors::Library> Vendors::opened() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return libraries(found_);
}

std::vector<Vendors::Library> Vendors::libraries(const std::map<c10::DeviceType, Found>& found) {
  std::vector<Library> libraries;
  for (const auto& each : found) {
    if (each.second.library) libraries.push_back(each.second.library);
  }
  return libraries;
}

std::vector<Vendors::Library> Vendors::take() {
  decltype(found_) taken;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    taken.swap(found_);
  }
  return libraries(taken);
}

void close_all(const std::vector<Vendors::Library>& libraries, std::chrono::milliseconds timeout) {
  std::exception_ptr raised;
  for (const Vendors::Library& library : libraries) {
    try {
      if (raised) {
        library->abort();
      } else {
        library->close(timeout);
      }
    } catch (const std::exception&) {
      if (!raised) raised = std::current_exception();
    }
  }
  if (raised) std::rethrow_exception(raised);
}

}  // namespace sagellm
