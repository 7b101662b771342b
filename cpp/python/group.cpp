#include "python/bindings.hpp"

#include <pybind11/chrono.h>
#include <chrono>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "c10d/backend.hpp"
#include "c10d/options.hpp"
#include "c10d/rendezvous.hpp"
#include "host/errors.hpp"
#include "host/per_process.hpp"
#include "host/python_host.hpp"

namespace sagellm {

namespace {

using Options = BackendOptions;
// Converted from a timedelta or from a number of seconds.
using Seconds = std::chrono::duration<double>;

std::chrono::milliseconds milliseconds(Seconds seconds) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(seconds);
}

// Makes options from keyword arguments, with the defaults of the struct. The Python package checks and sets the
// arguments, because pybind11's own error for a wrong name or type does not help a user.
c10::intrusive_ptr<Options> make_options(const py::args& positional, const py::kwargs& given) {
  auto options = c10::make_intrusive<Options>();
  if (!positional.empty() || !given.empty()) {
    py::module_::import("torch_sagellm._private.options").attr("apply")(options, positional, given);
  }
  return options;
}

// Marks the process that made the last group. Empty before the first group.
std::optional<ProcessMark> process_of_groups;

// Runs `body` without the GIL. Then writes the lines that were logged meanwhile, also if `body` throws.
template <class Body>
auto told(const Body& body) {
  try {
    auto made = without_gil(body);
    drain_log();
    return made;
  } catch (...) {
    drain_log();
    throw;
  }
}

std::shared_ptr<Rendezvous> start_rendezvous(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                             Seconds timeout, std::string group_name,
                                             const std::vector<int64_t>& global_ranks,
                                             const c10::intrusive_ptr<Options>& given) {
  // The caller's object may serve several groups, so each backend gets a copy.
  auto options = given ? given->copy() : c10::make_intrusive<Options>();
  options->timeout = milliseconds(timeout);
  options->group_name = std::move(group_name);
  options->global_ranks_in_group.assign(global_ranks.begin(), global_ranks.end());
  process_of_groups.emplace();
  return told([&] { return std::make_shared<Rendezvous>(store, rank, size, std::move(options)); });
}

c10::intrusive_ptr<SageBackend> build(Rendezvous& decided, c10::intrusive_ptr<c10d::Backend> delegate) {
  return told([&] { return decided.build(std::move(delegate)); });
}

void connect(Rendezvous& decided, const std::string& address, const std::string& paths, const std::string& link) {
  told([&] {
    decided.connect(address, paths, link);
    return 0;
  });
}

// The bytes come from the store and need not be valid text.
py::str as_text(const std::string& bytes) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

py::str tell_failure(Rendezvous& decided, const std::string& text) {
  return as_text(without_gil([&] { return decided.tell_failure(text); }));
}

py::str told_failure(Rendezvous& decided) {
  return as_text(without_gil([&] { return decided.told_failure(); }));
}

// Asks the core, without the GIL.
template <class Question>
auto ask(const SageBackend& self, const Question& question) {
  return without_gil([&] { return checked([&] { return question(self.core()); }); });
}

// Python names a device by a text.
template <std::string (SageBackend::*question)(c10::DeviceType) const>
std::string of_device(const SageBackend& self, const std::string& device) {
  return (self.*question)(c10::Device(device).type());
}

// Begins one message with the tensors of a list from index `begin` to before `end`.
template <c10::intrusive_ptr<c10d::Work> (SageBackend::*message)(std::vector<at::Tensor>&, int, int)>
c10::intrusive_ptr<c10d::Work> of_list(SageBackend& self, const py::list& list, size_t begin, size_t end, int peer,
                                       int tag) {
  constexpr bool receives = message == &SageBackend::recv_list;
  const char* const call = receives ? "recv_tensors" : "send_tensors";
  if (!self.delegate_reason().empty()) value_error(call, "a delegate serves the group, which sends single tensors");
  std::vector<at::Tensor> tensors = tensors_of(call, list, begin, end);
  if (receives) {
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
  return without_gil([&] { return (self.*message)(tensors, peer, tag); });
}

// Begins one message with rows of a tensor.
template <c10::intrusive_ptr<c10d::Work> (SageBackend::*message)(std::vector<at::Tensor>&, const at::Tensor&, int, int)>
c10::intrusive_ptr<c10d::Work> of_rows(SageBackend& self, const at::Tensor& tensor, const at::Tensor& rows, int peer,
                                       int tag) {
  constexpr bool receives = message == &SageBackend::recv_rows;
  if (receives && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  std::vector<at::Tensor> list{tensor};
  return without_gil([&] { return (self.*message)(list, rows, peer, tag); });
}

c10::intrusive_ptr<c10d::Work> all_to_all_rows(SageBackend& self, at::Tensor& output,
                                               const std::optional<at::Tensor>& output_rows,
                                               std::vector<int64_t> output_splits, at::Tensor& input,
                                               const std::optional<at::Tensor>& input_rows,
                                               std::vector<int64_t> input_splits, bool async_op) {
  if (!output.is_inference()) output.unsafeGetTensorImpl()->bump_version();
  return without_gil([&] {
    return self.all_to_all_rows(output, output_rows ? &*output_rows : nullptr, output_splits, input,
                                input_rows ? &*input_rows : nullptr, input_splits, async_op);
  });
}

py::object of_gloo(const Options& options, const char* name, py::object value) {
  if (options.as_gloo) return value;
  throw py::attribute_error(c10::str("'Options' object has no attribute '", name, "'"));
}

void bind_options(py::module_& module) {
  // pybind11 must know the base classes before it registers ours.
  py::module_::import("torch._C._distributed_c10d");
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(
      module, "Options", "Options of a sagellm process group, for the argument pg_options.")
      .def(py::init(&make_options))
      .def_readwrite("engine", &Options::engine)
      .def_readwrite("delegate", &Options::delegate)
      .def_readwrite("fusion", &Options::fusion)
      .def_readwrite("strict", &Options::strict)
      .def_readwrite("algorithm", &Options::algorithm)
      .def_readwrite("vendor", &Options::vendor)
      .def_readwrite("topology", &Options::topology)
      .def_readwrite("measure_link", &Options::measure_link)
      .def_readwrite("numa", &Options::numa)
      .def_readwrite("threads", &Options::threads)
      .def_readwrite("links", &Options::links)
      .def_readwrite("soft_timeout", &Options::soft_timeout)
      .def_readwrite("verify", &Options::verify)
      .def_readwrite("on_device_failure", &Options::on_device_failure)
      .def_readwrite("blocking_wait", &Options::blocking_wait)
      .def_readwrite("_library_folders", &Options::library_folders)
      .def_readwrite("_as_gloo", &Options::as_gloo)
      // Attributes of gloo's options that programs read. The last three exist only if the group was asked for as gloo.
      .def_property_readonly("backend",
                             [](const Options& self) { return self.as_gloo ? std::string("gloo") : self.backend; })
      .def_property_readonly("enable_reconfigure",
                             [](const Options& self) { return of_gloo(self, "enable_reconfigure", py::bool_(false)); })
      .def_property_readonly("_threads", [](const Options& self) { return of_gloo(self, "_threads", py::int_(2)); })
      .def_property_readonly("_devices", [](const Options& self) { return of_gloo(self, "_devices", py::list()); })
      .def_readwrite("_attempt", &Options::attempt)
      .def_readwrite("_addresses", &Options::addresses)
      .def_readwrite("_forked", &Options::forked)
      .def("__repr__",
           [](const py::object& self) {
             return py::module_::import("torch_sagellm._private.options").attr("shown")(self);
           })
      .def("__copy__", [](const Options& self) { return self.copy(); })
      .def("__deepcopy__", [](const Options& self, const py::dict&) { return self.copy(); }, py::arg("memo"));
}

void bind_backend(py::module_& module) {
  py::class_<Rendezvous, std::shared_ptr<Rendezvous>>(module, "Rendezvous",
                                                      "What the ranks of a group decided before it is built.")
      .def_property_readonly("delegate_reason", &Rendezvous::delegate_reason)
      .def_property_readonly("spans_hosts", &Rendezvous::spans_hosts)
      .def_property_readonly("id", &Rendezvous::id)
      .def_property_readonly("network", &Rendezvous::network)
      .def("_tell_failure", translated(&tell_failure), py::arg("text"))
      .def("_told_failure", translated(&told_failure))
      .def("_connect", translated(&connect), py::arg("address"), py::arg("paths") = "", py::arg("link") = "tcp")
      .def("build", translated(&build), py::arg("delegate") = py::none());
  py::class_<SageBackend, c10d::Backend, c10::intrusive_ptr<SageBackend>>(module, "SageBackend",
                                                                          "One process group of the sagellm backend.")
      .def_property_readonly("delegate_reason", &SageBackend::delegate_reason)
      .def("describe", &SageBackend::describe)
      .def_property_readonly("fault", [](const SageBackend& self) { return without_gil([&] { return self.fault(); }); })
      .def("_explain",
           translated([](const SageBackend& self, const std::string& kind, uint64_t bytes, const std::string& dtype) {
             return parsed(checked([&] { return self.core().explain(kind, bytes, dtype); }));
           }),
           py::arg("kind"), py::arg("bytes"), py::arg("dtype"))
      .def("_explain_number", translated([](const SageBackend& self, uint64_t number) {
             return parsed(checked([&] { return self.core().explain_number(number); }));
           }),
           py::arg("number"))
      .def("_device_library", &of_device<&SageBackend::device_library>, py::arg("device"))
      .def("_device_reason", &of_device<&SageBackend::device_reason>, py::arg("device"))
      .def(
          "_stats",
          [](const SageBackend& self) { return parsed(ask(self, [](const RustGroup& core) { return core.stats(); })); })
      .def("_totals",
           [](const SageBackend& self) {
             return parsed(ask(self, [](const RustGroup& core) { return core.totals(); }));
           })
      .def(
          "_records",
          [](const SageBackend& self, size_t last) {
            return parsed(ask(self, [&](const RustGroup& core) { return core.records(last); }));
          },
          py::arg("last") = std::numeric_limits<size_t>::max())
      .def(
          "_reset_stats", [](const SageBackend& self) { self.core().reset_stats(); },
          py::call_guard<py::gil_scoped_release>())
      // torch's own backend classes have this method, too.
      .def("_set_default_timeout", &SageBackend::setTimeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("_store", &SageBackend::store)
      .def("_send_list", translated(&of_list<&SageBackend::send_list>), "tensors"_a, "begin"_a, "end"_a, "dst"_a,
           "tag"_a)
      .def("_recv_list", translated(&of_list<&SageBackend::recv_list>), "tensors"_a, "begin"_a, "end"_a, "src"_a,
           "tag"_a)
      .def("_send_rows", translated(&of_rows<&SageBackend::send_rows>), "tensor"_a, "rows"_a, "dst"_a, "tag"_a)
      .def("_recv_rows", translated(&of_rows<&SageBackend::recv_rows>), "tensor"_a, "rows"_a, "src"_a, "tag"_a)
      .def("_all_to_all_rows", translated(&all_to_all_rows), "output"_a, "output_rows"_a, "output_splits"_a, "input"_a,
           "input_rows"_a, "input_splits"_a, "async_op"_a)
      .def("_has_failed", &SageBackend::has_failed, py::call_guard<py::gil_scoped_release>())
      .def("_watched", &SageBackend::watched, py::call_guard<py::gil_scoped_release>())
      .def("_gone", &SageBackend::gone, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly(
          "options",
          [](SageBackend& self) { return c10::static_intrusive_pointer_cast<Options>(self.getBackendOptions()); })
      // new_group calls this on ranks outside of the new group if the group is bound to a device. Only members meet
      // here.
      .def("perform_nocolor_split", [](SageBackend&, const py::object&) {}, py::arg("device"));
}

}  // namespace

void bind_groups(py::module_& module) {
  bind_options(module);
  bind_backend(module);
  module.def("rendezvous", translated(&start_rendezvous), py::arg("store"), py::arg("rank"), py::arg("size"),
             py::arg("timeout"), py::arg("group_name") = "", py::arg("global_ranks") = std::vector<int64_t>(),
             py::arg("options") = py::none());
}

bool has_made_groups() {
  return process_of_groups && !process_of_groups->inherited();
}

}  // namespace sagellm
