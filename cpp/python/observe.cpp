#include "python/bindings.hpp"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "host/errors.hpp"
#include "host/slices.hpp"
#include "sagellm/src/ffi/observe.rs.h"
#include "work/steps.hpp"
#include "work/work.hpp"

namespace sagellm {

namespace {

using Text = const std::string&;

py::str text(const rust::String& string) {
  return {string.data(), string.size()};
}

// Returns a list that has `convert(item)` for each item.
template <class Item, class Convert>
py::list list_of(const rust::Vec<Item>& items, const Convert& convert) {
  py::list found;
  for (const Item& item : items) found.append(convert(item));
  return found;
}

// Empty for the Work of a delegate, and for a call for which the core has no operation.
py::list explain_work(const c10::intrusive_ptr<c10d::Work>& work) {
  py::list found;
  const auto* const own = dynamic_cast<const SageWork*>(work.get());
  if (own == nullptr) return found;
  for (const rust::String& each : own->explain()) found.append(parsed(each));
  return found;
}

py::object explain_without_group(Text kind, uint64_t bytes, Text dtype, size_t ranks, Text algorithm) {
  return parsed(checked([&] { return Core::explain_without_group(ranks, algorithm, kind, bytes, dtype); }));
}

py::object start_rule(Text kind, uint64_t bytes, size_t ranks, Text topology) {
  return parsed(checked([&] { return Core::start_rule(ranks, topology, kind, bytes); }));
}

py::object table_without_group(size_t ranks, Text algorithm) {
  return parsed(checked([&] { return Core::table_without_group(ranks, algorithm); }));
}

py::str save_table(size_t ranks, Text made, Text lines) {
  return text(checked([&] { return Core::save_table(ranks, made, lines); }));
}

py::list algorithms_of(Text kind) {
  return list_of(checked([&] { return Core::algorithms_of(kind); }), text);
}

// Seconds and number of segments for each size. `host` and `network` are alpha, overhead and beta.
py::list predict(Text kind, Text algorithm, size_t ranks, const std::vector<double>& sizes,
                 const std::array<double, 3>& host, const std::array<double, 3>& network, double gamma,
                 size_t ranks_per_host) {
  const CostModel model{host[0], host[1], host[2], network[0], network[1], network[2], gamma, ranks_per_host};
  const auto found =
      without_gil([&] { return checked([&] { return Core::predict(kind, algorithm, ranks, slice(sizes), model); }); });
  return list_of(found, [](const Prediction& one) { return py::make_tuple(one.seconds, one.segments); });
}

// The number of parts and the rank's messages. Of each message: its step, whether the rank sends it, the peer, the
// parts, and what the receiver does with them.
py::tuple program(Text kind, Text algorithm, size_t ranks, size_t segments, size_t rank) {
  const Program found = checked([&] { return Core::program(kind, algorithm, ranks, segments, rank); });
  return py::make_tuple(found.parts, list_of(found.messages, [](const ProgramLine& one) {
                          const auto numbers = list_of(one.parts, [](size_t part) { return py::int_(part); });
                          return py::make_tuple(one.step, one.sends, one.peer, numbers, text(one.how));
                        }));
}

py::object doctor() {
  return parsed(without_gil([] { return Core::machine_facts(); }));
}

// Uses Python's C API, because with pybind11's conversions most of a step's cost would be conversion.
PyObject* begin_step(PyObject* /*module*/, PyObject* /*nothing*/) {
  StepMeter::begin();
  Py_RETURN_NONE;
}

PyObject* end_step(PyObject* /*module*/, PyObject* well) {
  StepMeter::end(well == Py_True);
  Py_RETURN_NONE;
}

PyMethodDef begin_step_method = {"_begin_step", begin_step, METH_NOARGS, nullptr};
PyMethodDef end_step_method = {"_end_step", end_step, METH_O, nullptr};

py::dict step_sums() {
  const StepSums sums = StepMeter::sums();
  return py::dict("count"_a = sums.count, "took"_a = sums.took, "in_calls"_a = sums.in_calls,
                  "in_futures"_a = sums.in_futures, "last"_a = sums.last);
}

}  // namespace

py::object parsed(const rust::String& json) {
  return py::module_::import("json").attr("loads")(text(json));
}

void bind_observation(py::module_& module) {
  module.attr("KINDS") = py::tuple(list_of(Core::kind_names(), text));
  module.attr("DTYPES") = py::tuple(list_of(Core::dtype_names(), text));
  define(module, "explain_work", &explain_work, "work"_a);
  define(module, "explain_without_group", &explain_without_group, "kind"_a, "bytes"_a, "dtype"_a, "ranks"_a,
         "algorithm"_a = "");
  define(module, "start_rule", &start_rule, "kind"_a, "bytes"_a, "ranks"_a, "topology"_a);
  define(module, "table_without_group", &table_without_group, "ranks"_a, "algorithm"_a = "");
  define(module, "save_table", &save_table, "ranks"_a, "made"_a, "lines"_a);
  define(module, "algorithms_of", &algorithms_of, "kind"_a);
  define(module, "predict", &predict, "kind"_a, "algorithm"_a, "ranks"_a, "sizes"_a, "host"_a, "network"_a, "gamma"_a,
         "ranks_per_host"_a);
  define(module, "program", &program, "kind"_a, "algorithm"_a, "ranks"_a, "segments"_a, "rank"_a);
  define(module, "doctor", &doctor);
  module.attr("_begin_step") = py::reinterpret_steal<py::object>(PyCFunction_New(&begin_step_method, nullptr));
  module.attr("_end_step") = py::reinterpret_steal<py::object>(PyCFunction_New(&end_step_method, nullptr));
  define(module, "_step_sums", &step_sums);
  define(module, "_reset_steps", &StepMeter::reset);
}

}  // namespace sagellm
