#include "c10d/observe.hpp"

#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "host/errors.hpp"
#include "work/work.hpp"

namespace sagellm {

namespace {

using namespace py::literals;  // NOLINT(google-build-using-namespace): "name"_a
using Text = const std::string&;

py::str text(const rust::String& string) {
  return {string.data(), string.size()};
}

// `convert` of each item.
template <class Item, class Convert>
py::list list_of(const rust::Vec<Item>& items, const Convert& convert) {
  py::list found;
  for (const Item& item : items) found.append(convert(item));
  return found;
}

py::object past(const Explanation& found) {
  if (!found.past) return py::none();
  const Batch& all = found.batch;
  py::object batch = py::none();
  if (all.operations > 0) {
    batch =
        py::dict("operations"_a = all.operations, "first"_a = all.first, "last"_a = all.last, "bytes"_a = all.bytes);
  }
  return py::dict("number"_a = found.number, "host_staged"_a = found.host_staged, "recorded"_a = found.recorded,
                  "batch"_a = std::move(batch));
}

py::dict of_alternative(const Alternative& other) {
  return py::dict("way"_a = text(other.way), "predicted_ns"_a = other.predicted_ns, "why_not"_a = text(other.why_not));
}

py::dict of_row(const ChoiceRow& row) {
  return py::dict("kind"_a = text(row.kind), "sizes"_a = text(row.sizes), "way"_a = text(row.way),
                  "reason"_a = text(row.reason), "measured_ns"_a = row.measured_ns);
}

py::dict of_cell(const Cell& cell) {
  const auto bucket = [](const Bucket& each) { return py::make_tuple(each.bound, each.count); };
  return py::dict("kind"_a = text(cell.kind), "path"_a = text(cell.path), "size_class"_a = cell.size_class,
                  "count"_a = cell.count, "failed"_a = cell.failed, "tensors"_a = cell.tensors, "bytes"_a = cell.bytes,
                  "whole"_a = cell.whole, "took"_a = cell.took, "waiting"_a = cell.waiting, "copying"_a = cell.copying,
                  "reducing"_a = cell.reducing, "longest"_a = cell.longest, "times"_a = list_of(cell.times, bucket));
}

py::dict of_record(const Record& record) {
  return py::dict("id"_a = record.id, "number"_a = record.number, "kind"_a = text(record.kind),
                  "dtype"_a = text(record.dtype), "op"_a = text(record.op), "path"_a = text(record.path),
                  "reason"_a = text(record.reason), "state"_a = text(record.state), "counts"_a = record.counts,
                  "tensors"_a = record.tensors, "element"_a = record.element, "site"_a = record.site,
                  "host_staged"_a = record.host_staged, "root"_a = record.root, "tag"_a = record.tag,
                  "late"_a = record.late, "together"_a = record.together, "first"_a = record.first,
                  "last"_a = record.last, "read"_a = record.read, "written"_a = record.written,
                  "issued"_a = record.issued, "ended"_a = record.ended, "waiting"_a = record.waiting,
                  "copying"_a = record.copying, "reducing"_a = record.reducing);
}

// None for the work of a delegate, or of a call for which the core has no operation.
py::list explain_work(const c10::intrusive_ptr<c10d::Work>& work) {
  py::list found;
  const auto* const own = dynamic_cast<const SageWork*>(work.get());
  if (own == nullptr) return found;
  for (const Explanation& each : own->explain()) found.append(to_dict(each));
  return found;
}

py::dict explain_without_group(Text kind, uint64_t bytes, Text dtype, size_t ranks, Text algorithm) {
  return to_dict(checked([&] { return Core::explain_without_group(ranks, algorithm, kind, bytes, dtype); }));
}

py::dict start_rule(Text kind, uint64_t bytes, size_t ranks, Text topology) {
  return to_dict(checked([&] { return Core::start_rule(ranks, topology, kind, bytes); }));
}

py::dict table_without_group(size_t ranks, Text algorithm) {
  const ChoiceTable table = checked([&] { return Core::table_without_group(ranks, algorithm); });
  return py::dict("note"_a = text(table.note), "rules"_a = list_of(table.rules, text),
                  "rows"_a = list_of(table.rows, of_row));
}

py::str save_table(size_t ranks, Text made, Text lines) {
  return text(checked([&] { return Core::save_table(ranks, made, lines); }));
}

py::list algorithms_of(Text kind) {
  return list_of(checked([&] { return Core::algorithms_of(kind); }), text);
}

// Seconds and segments at each size. `host` and `network` are alpha, overhead and beta.
py::list predict(Text kind, Text algorithm, size_t ranks, const std::vector<double>& sizes,
                 const std::array<double, 3>& host, const std::array<double, 3>& network, double gamma,
                 size_t ranks_per_host) {
  const CostModel model{host[0], host[1], host[2], network[0], network[1], network[2], gamma, ranks_per_host};
  rust::Vec<Prediction> found;
  {
    const py::gil_scoped_release no_gil;
    found = checked([&] { return Core::predict(kind, algorithm, ranks, {sizes.data(), sizes.size()}, model); });
  }
  return list_of(found, [](const Prediction& one) { return py::make_tuple(one.seconds, one.segments); });
}

// The number of parts, and for each message whether the rank sends it, its peer, its parts, and what the receiver does
// with them.
py::tuple program(Text kind, Text algorithm, size_t ranks, size_t segments, size_t rank) {
  const Program found = checked([&] { return Core::program(kind, algorithm, ranks, segments, rank); });
  return py::make_tuple(found.parts, list_of(found.messages, [](const ProgramLine& one) {
                          const auto numbers = list_of(one.parts, [](size_t part) { return py::int_(part); });
                          return py::make_tuple(one.step, one.sends, one.peer, numbers, text(one.how));
                        }));
}

py::dict doctor() {
  rust::Vec<Fact> facts;
  {
    const py::gil_scoped_release no_gil;
    facts = Core::machine_facts();
  }
  py::dict found;
  for (const Fact& fact : facts) found[text(fact.name)] = text(fact.value);
  return found;
}

}  // namespace

py::dict to_dict(const Explanation& found) {
  return py::dict("kind"_a = text(found.kind), "bytes"_a = found.bytes, "ranks"_a = found.ranks,
                  "hosts"_a = found.hosts, "slot_bytes"_a = found.slot_bytes, "choice"_a = text(found.choice),
                  "reason"_a = text(found.reason), "code"_a = found.code, "library"_a = text(found.library),
                  "ran"_a = text(found.ran), "decided"_a = text(found.decided), "predicted_ns"_a = found.predicted_ns,
                  "measured_ns"_a = found.measured_ns, "table"_a = text(found.table),
                  "overruled"_a = list_of(found.overruled, text),
                  "rejected"_a = list_of(found.rejected, of_alternative), "past"_a = past(found));
}

py::dict to_dict(const Stats& stats) {
  const auto wait = [](const PeerWait& each) { return py::make_tuple(each.count, each.total, each.longest); };
  return py::dict("rank"_a = stats.rank, "size"_a = stats.size, "now"_a = stats.now, "wall"_a = stats.wall,
                  "since"_a = stats.since, "issued"_a = stats.issued, "batches"_a = stats.batches,
                  "batched_ops"_a = stats.batched_ops, "largest_batch"_a = stats.largest_batch,
                  "host_staged_count"_a = stats.host_staged_count, "host_staged_bytes"_a = stats.host_staged_bytes,
                  "waits"_a = list_of(stats.waits, wait), "cells"_a = list_of(stats.cells, of_cell));
}

py::list to_list(const rust::Vec<Record>& records, size_t last) {
  py::list found;
  const size_t skipped = records.size() - std::min(last, records.size());
  for (size_t at = 0; at < skipped; ++at) {
    if (records[at].state != "pending") continue;
    found.append(of_record(records[at]));
    break;
  }
  for (size_t at = skipped; at < records.size(); ++at) found.append(of_record(records[at]));
  return found;
}

void bind_observation(py::module_& module) {
  const auto def = [&](const char* name, auto function, const auto&... arguments) {
    module.def(name, torch::wrap_pybind_function(function), arguments...);
  };
  module.attr("KINDS") = py::tuple(list_of(Core::kind_names(), text));
  module.attr("DTYPES") = py::tuple(list_of(Core::dtype_names(), text));
  def("explain_work", &explain_work, "work"_a);
  def("explain_without_group", &explain_without_group, "kind"_a, "bytes"_a, "dtype"_a, "ranks"_a, "algorithm"_a = "");
  def("start_rule", &start_rule, "kind"_a, "bytes"_a, "ranks"_a, "topology"_a);
  def("table_without_group", &table_without_group, "ranks"_a, "algorithm"_a = "");
  def("save_table", &save_table, "ranks"_a, "made"_a, "lines"_a);
  def("algorithms_of", &algorithms_of, "kind"_a);
  def("predict", &predict, "kind"_a, "algorithm"_a, "ranks"_a, "sizes"_a, "host"_a, "network"_a, "gamma"_a,
      "ranks_per_host"_a);
  def("program", &program, "kind"_a, "algorithm"_a, "ranks"_a, "segments"_a, "rank"_a);
  def("doctor", &doctor);
}

}  // namespace sagellm
