// Functions over the memory of CPU tensors that need no group: the formats of compressed sums, and the rows of a
// mixture of experts.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace sagellm {

void bind_arrays(py::module_& module);

}  // namespace sagellm
