#include "host/simulate.hpp"

#include <torch/csrc/Exceptions.h>

#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "host/errors.hpp"
#include "sagellm/src/ffi/bridge.rs.h"

namespace sagellm {

namespace {

// Whether the rank sends, the peer, the part numbers, and what becomes of received parts.
using Message = std::tuple<size_t, bool, size_t, std::vector<size_t>, std::string>;

// By algorithm, seconds and segments at each size.
using Costs = std::vector<std::pair<std::string, std::vector<std::pair<double, size_t>>>>;

// `host` and `network` are alpha, overhead and beta.
Costs predicted(const std::string& kind, const std::string& algorithm, size_t ranks, const std::vector<double>& sizes,
                const std::array<double, 3>& host, const std::array<double, 3>& network, double gamma,
                size_t ranks_per_host) {
  const py::gil_scoped_release no_gil;
  const CostModel model{host[0], host[1], host[2], network[0], network[1], network[2], gamma, ranks_per_host};
  const auto found = checked([&] {
    return Core::predict(kind, algorithm, ranks, rust::Slice<const double>(sizes.data(), sizes.size()), model);
  });
  Costs result;
  for (const Prediction& one : found) {
    result.push_back({std::string(one.algorithm), {}});
    for (size_t at = 0; at < one.seconds.size(); ++at) {
      result.back().second.emplace_back(one.seconds[at], one.segments[at]);
    }
  }
  return result;
}

std::pair<size_t, std::vector<Message>> messages(const std::string& kind, const std::string& algorithm, size_t ranks,
                                                 size_t segments, size_t rank) {
  size_t parts = 0;
  const auto found = checked([&] { return Core::program(kind, algorithm, ranks, segments, rank, parts); });
  std::vector<Message> result;
  result.reserve(found.size());
  for (const ProgramLine& one : found) {
    result.emplace_back(one.step, one.sends, one.peer, std::vector<size_t>(one.parts.begin(), one.parts.end()),
                        std::string(one.how));
  }
  return {parts, std::move(result)};
}

}  // namespace

void bind_simulation(py::module_& module) {
  module.def("predict", torch::wrap_pybind_function(&predicted), py::arg("kind"), py::arg("algorithm"),
             py::arg("ranks"), py::arg("sizes"), py::arg("host"), py::arg("network"), py::arg("gamma"),
             py::arg("ranks_per_host"));
  module.def("program", torch::wrap_pybind_function(&messages), py::arg("kind"), py::arg("algorithm"), py::arg("ranks"),
             py::arg("segments"), py::arg("rank"));
}

}  // namespace sagellm
