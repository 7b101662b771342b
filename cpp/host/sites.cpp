#include "host/sites.hpp"

#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "compat.hpp"
#include "host/host.hpp"

namespace sagellm {

namespace {

// The texts of the places that `call_site` has numbered, for threads that must not wait for the GIL. The lock is held
// only for a look-up, with or without the GIL.
struct SeenPlaces {
  std::mutex mutex;
  std::unordered_map<uint32_t, std::string> texts;
};

SeenPlaces& places() {
  static auto* const all = new SeenPlaces;  // never freed, because threads may ask while the process ends
  return *all;
}

py::object sites(const char* function) {
  return py::module_::import("torch_sagellm.observe.sites").attr(function);
}

// When the interpreter ends, it unwinds a thread that asks for the GIL. The C++ and Rust functions that called this
// code must not be unwound, so this object's destructor keeps the thread here until the process has exited.
class NeverUnwound {
 public:
  NeverUnwound() = default;
  NeverUnwound(const NeverUnwound&) = delete;
  NeverUnwound& operator=(const NeverUnwound&) = delete;
  ~NeverUnwound() {
    while (!done_) ::pause();
  }
  void done() { done_ = true; }

 private:
  bool done_ = false;
};

std::string read_place(uint64_t thread) {
  NeverUnwound outside;
  std::string text;
  {
    const py::gil_scoped_acquire gil;
    NeverUnwound inside;
    try {
      text = sites("place_of_thread")(thread).cast<std::string>();
    } catch (const std::exception&) {
      // A place that cannot be read counts as unknown.
    }
    inside.done();
  }
  outside.done();
  return text;
}

}  // namespace

uint32_t call_site() {
  static const bool enabled = [] {
    const char* text = std::getenv("SAGELLM_CALL_SITES");
    return text != nullptr && std::string(text) == "1";
  }();
  // A thread that Python does not know has no place, and must not ask for the GIL.
  if (!enabled || Py_IsInitialized() == 0 || PyGILState_GetThisThreadState() == nullptr) return 0;
  const py::gil_scoped_acquire gil;
  const auto number = sites("number")().cast<uint32_t>();
  SeenPlaces& all = places();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (number == 0 || all.texts.count(number) > 0) return number;
  }
  auto text = sites("text_of")(number).cast<std::string>();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.texts.emplace(number, std::move(text));
  return number;
}

rust::String place_of_thread(uint64_t thread) noexcept {
  try {
    return rust::String::lossy(python_alive() ? read_place(thread) : std::string());
  } catch (const std::exception&) {
    return {};  // a place that cannot be read counts as unknown
  }
}

rust::String place_of_call(uint32_t site) noexcept {
  try {
    SeenPlaces& all = places();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.texts.find(site);
    return rust::String::lossy(found == all.texts.end() ? std::string() : found->second);
  } catch (const std::exception&) {
    return {};  // a place that cannot be read counts as unknown
  }
}

}  // namespace sagellm
