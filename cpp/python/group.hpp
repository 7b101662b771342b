// Groups in Python: the classes `Options`, `Rendezvous` and `SageBackend`.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace sagellm {

void bind_groups(py::module_& module);

// True if this process has made a group. A forked child that made none has nothing to clean up at its exit.
bool has_made_groups();

}  // namespace sagellm
