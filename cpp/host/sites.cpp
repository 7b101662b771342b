#include "host/sites.hpp"

#include <torch/csrc/utils/pybind.h>

#include <cstdlib>
#include <string>

namespace sagellm {

uint32_t call_site() {
  static const bool enabled = [] {
    const char* text = std::getenv("SAGELLM_CALL_SITES");
    return text != nullptr && std::string(text) == "1";
  }();
  // A thread that Python does not know has no place, and must not ask for the GIL.
  if (!enabled || Py_IsInitialized() == 0 || PyGILState_GetThisThreadState() == nullptr) return 0;
  const py::gil_scoped_acquire gil;
  return py::module_::import("sagellm.observe.sites").attr("number")().cast<uint32_t>();
}

}  // namespace sagellm
