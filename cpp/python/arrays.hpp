// The formats of compressed sums and the rows of a mixture of experts for Python: functions over the memory of CPU
// tensors, which need no group.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace sagellm {

void bind_arrays(py::module_& module);

}  // namespace sagellm
