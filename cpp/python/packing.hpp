// Inspects and copies lists of CPU tensors, each list in one call. For thousands of small tensors, a loop in Python
// takes longer than their transfer.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace sagellm {

void bind_packing(py::module_& module);

}  // namespace sagellm
