// Lists of CPU tensors as Python has them, looked at and copied in one call: what a loop in Python does for each of
// thousands of small tensors takes longer than they travel.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace sagellm {

void bind_packing(py::module_& module);

}  // namespace sagellm
