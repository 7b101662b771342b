// How tests drive streams, events and works without a vendor's library: a launcher of theirs, given as C functions.
#pragma once

#include "compat.hpp"

namespace sagellm {

void bind_device_probe(pybind11::module_& module);

}  // namespace sagellm
