// Explanations, statistics and predictions for Python. The core answers in JSON, so that its fields need not be named
// here once more; `_C.pyi` has their types.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "rust/cxx.h"

namespace sagellm {

// Parses an answer of the core. Needs the GIL.
py::object parsed(const rust::String& json);

// Binds the functions that need no group, and the tuples `KINDS` and `DTYPES`.
void bind_observation(py::module_& module);

}  // namespace sagellm
