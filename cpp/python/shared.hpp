// Tensors in memory that peers can reach: the functions for Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace sagellm {

void bind_shared(py::module_& module);

}  // namespace sagellm
