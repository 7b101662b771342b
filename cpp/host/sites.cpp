#include "host/sites.hpp"

#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

namespace sagellm {

namespace {

// Programs call from few places; what comes later is not told apart any more.
constexpr size_t kMost = 1 << 16;

struct Table {
  std::mutex mutex;
  std::map<std::tuple<std::string, std::string, int>, uint32_t> numbers;
  std::vector<Site> sites;
};

Table& table() {
  // Never destroyed: threads may still ask at exit.
  static Table* const one = new Table();
  return *one;
}

bool enabled() {
  static const bool on = [] {
    const char* text = std::getenv("SAGELLM_CALL_SITES");
    return text != nullptr && std::string(text) == "1";
  }();
  return on;
}

// The folders of the packages torch and sagellm, each with a slash at its end. They are written as the interpreter
// writes them into the code it loads from there, so that a comparison of text is enough. Needs the GIL.
const std::vector<std::string>& package_folders() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<std::vector<std::string>> storage;
  return storage
      .call_once_and_store_result([] {
        std::vector<std::string> folders;
        for (const char* name : {"torch", "sagellm"}) {
          for (const py::handle folder : py::module_::import(name).attr("__path__")) {
            folders.push_back(folder.cast<std::string>() + "/");
          }
        }
        return folders;
      })
      .get_stored();
}

// Whether a file of code belongs to torch or to this package, and so is no place that a user would look for.
bool is_ours(const std::string& file) {
  const auto& folders = package_folders();
  return std::any_of(folders.begin(), folders.end(),
                     [&](const std::string& folder) { return file.compare(0, folder.size(), folder) == 0; });
}

uint32_t number_of(Site site) {
  Table& all = table();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto key = std::make_tuple(site.file, site.function, site.line);
  const auto found = all.numbers.find(key);
  if (found != all.numbers.end()) return found->second;
  if (all.sites.size() >= kMost) return 0;
  all.sites.push_back(std::move(site));
  const auto number = static_cast<uint32_t>(all.sites.size());
  all.numbers.emplace(key, number);
  return number;
}

}  // namespace

uint32_t call_site() {
  // A thread that Python does not know has no place, and must not ask for the GIL.
  if (!enabled() || Py_IsInitialized() == 0 || PyGILState_GetThisThreadState() == nullptr) return 0;
  Site site;
  {
    const py::gil_scoped_acquire gil;
    auto frame =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
    while (frame) {
      auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
      const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
      const auto file = code.attr("co_filename").cast<std::string>();
      if (!is_ours(file)) {
        site = {file, code.attr("co_name").cast<std::string>(), PyFrame_GetLineNumber(raw)};
        break;
      }
      frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
    }
  }
  return site.file.empty() ? 0 : number_of(std::move(site));
}

Site site_of(uint32_t number) {
  Table& all = table();
  std::lock_guard<std::mutex> lock(all.mutex);
  return number == 0 || number > all.sites.size() ? Site() : all.sites[number - 1];
}

}  // namespace sagellm
