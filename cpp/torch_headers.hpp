// The headers of torch and Python that `setup.py` precompiles. Nearly every file of `cpp/` reads these headers, and
// they take many times as long to read as our own. No file includes this one, and each file still includes what it
// uses.
//
// pybind11 is left out, although several files read it: every file that has read its templates instantiates them again,
// which took 3.3 s in an empty file.
#pragma once

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
