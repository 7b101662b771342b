// Lists in the form that the bridge takes.
#pragma once

#include "rust/cxx.h"

namespace sagellm {

// Slice of a std::vector or a c10::SmallVector. An empty vector may have a null pointer, which cxx accepts as an empty
// slice.
template <class List>
rust::Slice<const typename List::value_type> slice(const List& list) {
  return {list.data(), list.size()};
}

}  // namespace sagellm
