// Explanations, statistics and predictions for Python. The core answers in JSON, so that what it tells is not named
// here once more; `_C.pyi` has the types.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "rust/cxx.h"

namespace sagellm {

// An answer of the core. Needs the GIL.
py::object parsed(const rust::String& json);

// The functions that need no group, and the tuples `KINDS` and `DTYPES`.
void bind_observation(py::module_& module);

}  // namespace sagellm
