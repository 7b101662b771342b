// Lists as the bridge takes them.
#pragma once

#include "rust/cxx.h"

namespace sagellm {

// Of a vector of either kind. An empty one may have a null pointer, which cxx takes for an empty slice.
template <class List>
rust::Slice<const typename List::value_type> slice(const List& list) {
  return {list.data(), list.size()};
}

}  // namespace sagellm
