// What `python -m sagellm simulate` asks the core for.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace sagellm {

void bind_simulation(py::module_& module);

}  // namespace sagellm
