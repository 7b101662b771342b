// Explanations, statistics and predictions for Python: the bridge's structs as dicts, whose keys and types `_C.pyi`
// names.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

// All of these need the GIL.
py::dict to_dict(const Explanation& found);
py::dict to_dict(const Stats& stats);
// The last records, at most this many, and before them the record of the oldest pending operation, if that is older.
py::list to_list(const rust::Vec<Record>& records, size_t last);

// The functions that need no group, and the tuples `KINDS` and `DTYPES`.
void bind_observation(py::module_& module);

}  // namespace sagellm
