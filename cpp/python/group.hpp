// Groups as Python sees them: `Options`, `Rendezvous`, `SageBackend`.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace sagellm {

void bind_groups(py::module_& module);

// Whether this process has made a group. A forked child that made none has nothing to end at its exit.
bool has_made_groups();

}  // namespace sagellm
