// The parts of `torch_sagellm._C`, and what all of them use.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "rust/cxx.h"

namespace sagellm {

using namespace py::literals;  // NOLINT(google-build-using-namespace): "name"_a

// The classes `Options`, `Rendezvous` and `SageBackend`.
void bind_groups(py::module_& module);
// True if this process has made a group. A forked child that made none has nothing to clean up at its exit.
bool has_made_groups();

// Explanations, statistics and predictions that need no group, and the tuples `KINDS` and `DTYPES`. The core answers in
// JSON, so that the fields of an answer need not be named here once more; `_C.pyi` has their types.
void bind_observation(py::module_& module);
// Parses an answer of the core. Needs the GIL.
py::object parsed(const rust::String& json);

// Functions over the memory of CPU tensors that need no group: the formats of compressed sums, and the rows of a
// mixture of experts.
void bind_arrays(py::module_& module);

// Inspects and copies lists of CPU tensors, each list in one call. For thousands of small tensors, a loop in Python
// takes longer than their transfer.
void bind_packing(py::module_& module);

// The tensors of a list from index `begin` to before `end`. `call` is the program's call, for error texts. Throws if an
// element is not a tensor, or if its class has its own `__torch_dispatch__`.
std::vector<at::Tensor> tensors_of(const char* call, const py::list& list, size_t begin, size_t end);

// Tensors in memory that peers can reach.
void bind_shared(py::module_& module);

// Makes a function of this module translate torch's exceptions. c10d's own bindings do that by themselves.
template <class Function>
auto translated(Function function) {
  return torch::wrap_pybind_function(function);
}

// Adds such a function to the module.
template <class Function, class... Arguments>
void define(py::module_& module, const char* name, Function function, const Arguments&... arguments) {
  module.def(name, translated(function), arguments...);
}

template <class Body>
auto without_gil(const Body& body) {
  const py::gil_scoped_release no_gil;
  return body();
}

}  // namespace sagellm
