// `torch_sagellm._C`, the extension that the Python package imports. Every function that may wait releases the GIL.
#include <torch/csrc/autograd/python_variable.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "c10d/backend.hpp"
#include "compat.hpp"
#include "device/watch.hpp"
#include "host/alarm.hpp"
#include "host/python_host.hpp"
#include "python/bindings.hpp"
#include "sagellm/src/ffi/observe.rs.h"
#include "work/callbacks.hpp"
#include "work/delegated.hpp"

namespace sagellm {

namespace {

// Called once, by atexit. Afterwards no thread of ours runs that might ask for the GIL.
void leave() {
  if (!has_made_groups()) return;
  without_gil([] {
    Core::at_exit();
    Alarm::instance().stop();
    DeviceWatch::instance().stop(std::chrono::seconds(1));
    DroppedMessages::end_all();
    // This takes seconds if torch's flight recorder is still writing a trace after a failure.
    CallbackPool::instance().stop(std::chrono::seconds(5));
  });
  DeferredRelease::instance().release();
  // A signal handler may have raised while the groups were being left. No later call would raise its exception.
  std::exception_ptr raised = take_interrupt();
  try {
    drain_log();
  } catch (const py::error_already_set&) {
    raised = std::current_exception();
  }
  close_log();
  if (raised) std::rethrow_exception(raised);
}

// Wraps torch's coalescing manager for groups of ours, so that an exception ends its region. It is not written in
// Python, because a signal may raise at the beginning of a Python function, before its first statement. The region
// would then stay open. In these functions nothing can raise before their `try`.
class Manager {
 public:
  using Backends = std::vector<c10::intrusive_ptr<SageBackend>>;

  // `forget` makes torch forget the calls that it has recorded for the region.
  Manager(py::object theirs, Backends backends, py::object forget)
      : theirs_(std::move(theirs)), backends_(std::move(backends)), forget_(std::move(forget)) {}

  py::object enter() {
    return whole([&]() -> py::object { return theirs_.attr("__enter__")(); });
  }
  py::object exit(const py::object& kind, const py::object& error, const py::object& trace) {
    auto ended = whole([&]() -> py::object { return theirs_.attr("__exit__")(kind, error, trace); });
    if (!kind.is_none()) drop();
    return ended;
  }

 private:
  template <class Body>
  py::object whole(const Body& body) {
    try {
      return body();
    } catch (...) {
      drop();
      throw;
    }
  }
  void drop() {
    forget_();
    for (const auto& backend : backends_) backend->drop_region();
  }

  py::object theirs_;
  Backends backends_;
  py::object forget_;
};

// True for a tensor whose memory receives what a call writes. False for a tensor that is conjugated or negated when it
// is read, because torch copies no result back to it. Also false for a tensor without data, and for a sparse tensor,
// which has no memory of its own. Uses Python's C API, because a few conversions by pybind11 take as long as a small
// operation.
PyObject* receives(PyObject* /*module*/, PyObject* argument) {
  if (!THPVariable_Check(argument)) Py_RETURN_FALSE;
  const at::Tensor& tensor = THPVariable_Unpack(argument);
  constexpr c10::DispatchKeySet lazy({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  const bool plain = tensor.defined() && !tensor.key_set().has_any(lazy) && !tensor.is_meta();
  return PyBool_FromLong(plain && tensor.layout() == at::kStrided ? 1 : 0);
}

PyMethodDef receives_method = {"_receives", receives, METH_O, nullptr};

}  // namespace

}  // namespace sagellm

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace sagellm;
  module.doc() = "The C++ half of sagellm; use the package torch_sagellm instead.";
  module.attr("torch_version_built") = TORCH_VERSION;
  bind_groups(module);
  bind_observation(module);
  bind_arrays(module);
  bind_packing(module);
  bind_shared(module);
  module.def("set_log_level", &Core::set_log_level, py::arg("level"));
  module.def("drain_log", &drain_log);
  module.def(
      "_element",
      [](int number) {
        const auto type = static_cast<c10::ScalarType>(number);
        return std::make_pair(std::string(c10::toString(type)), c10::elementSize(type));
      },
      py::arg("number"));
  module.def(
      "_shared", [](const std::vector<at::Tensor>& tensors) { return without_gil([&] { return shared(tensors); }); },
      py::arg("tensors"));
  module.def("_outlive_python", &outlive_python);
  py::class_<Manager>(module, "_Manager")
      .def(py::init<py::object, Manager::Backends, py::object>(), py::arg("theirs"), py::arg("backends"),
           py::arg("forget"))
      .def("__enter__", &Manager::enter)
      .def("__exit__", &Manager::exit, py::arg("kind"), py::arg("error"), py::arg("trace"));
  module.attr("_receives") = py::reinterpret_steal<py::object>(PyCFunction_New(&receives_method, nullptr));
  module.def("at_exit", &leave);
  module.def("told_of_failure", [] { Alarm::instance().raised(); });
}
