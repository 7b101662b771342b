#include "c10d/observe.hpp"

#include <torch/csrc/Exceptions.h>

#include <string>
#include <utility>

#include "host/errors.hpp"
#include "work/work.hpp"

namespace sagellm {

namespace {

using namespace py::literals;  // NOLINT(google-build-using-namespace): "name"_a

py::str text(const rust::String& string) {
  return {string.data(), string.size()};
}

py::list texts(const rust::Vec<rust::String>& strings) {
  py::list found;
  for (const rust::String& string : strings) found.append(text(string));
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

py::dict to_dict(const Cell& cell) {
  py::list times;
  for (const Bucket& bucket : cell.times) times.append(py::make_tuple(bucket.bound, bucket.count));
  return py::dict("kind"_a = text(cell.kind), "path"_a = text(cell.path), "size_class"_a = cell.size_class,
                  "count"_a = cell.count, "failed"_a = cell.failed, "tensors"_a = cell.tensors, "bytes"_a = cell.bytes,
                  "whole"_a = cell.whole, "took"_a = cell.took, "waiting"_a = cell.waiting, "copying"_a = cell.copying,
                  "reducing"_a = cell.reducing, "longest"_a = cell.longest, "times"_a = std::move(times));
}

py::dict to_dict(const Record& record) {
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

// None for the work of a delegate, or of what the core has no operation for.
py::list explain_work(const c10::intrusive_ptr<c10d::Work>& work) {
  py::list found;
  const auto* const own = dynamic_cast<const SageWork*>(work.get());
  if (own == nullptr) return found;
  for (const Explanation& each : own->explain()) found.append(to_dict(each));
  return found;
}

py::dict choices(size_t ranks, const std::string& algorithm) {
  const ChoiceTable table = checked([&] { return Core::choices(ranks, algorithm, {}); });
  py::list rows;
  for (const ChoiceRow& row : table.rows) {
    rows.append(py::dict("kind"_a = text(row.kind), "sizes"_a = text(row.sizes), "way"_a = text(row.way),
                         "reason"_a = text(row.reason), "measured_ns"_a = row.measured_ns));
  }
  return py::dict("note"_a = text(table.note), "rules"_a = texts(table.rules), "rows"_a = std::move(rows));
}

}  // namespace

py::dict to_dict(const Explanation& found) {
  py::list rejected;
  for (const Alternative& other : found.rejected) {
    rejected.append(
        py::dict("way"_a = text(other.way), "predicted_ns"_a = other.predicted_ns, "why_not"_a = text(other.why_not)));
  }
  return py::dict("kind"_a = text(found.kind), "bytes"_a = found.bytes, "ranks"_a = found.ranks,
                  "hosts"_a = found.hosts, "slot_bytes"_a = found.slot_bytes, "choice"_a = text(found.choice),
                  "reason"_a = text(found.reason), "code"_a = found.code, "library"_a = text(found.library),
                  "ran"_a = text(found.ran), "decided"_a = text(found.decided), "predicted_ns"_a = found.predicted_ns,
                  "measured_ns"_a = found.measured_ns, "table"_a = text(found.table),
                  "overruled"_a = texts(found.overruled), "rejected"_a = std::move(rejected), "past"_a = past(found));
}

py::dict to_dict(const Stats& stats) {
  py::list waits;
  for (const PeerWait& wait : stats.waits) waits.append(py::make_tuple(wait.count, wait.total, wait.longest));
  py::list cells;
  for (const Cell& cell : stats.cells) cells.append(to_dict(cell));
  return py::dict("rank"_a = stats.rank, "size"_a = stats.size, "now"_a = stats.now, "wall"_a = stats.wall,
                  "since"_a = stats.since, "issued"_a = stats.issued, "batches"_a = stats.batches,
                  "batched_ops"_a = stats.batched_ops, "largest_batch"_a = stats.largest_batch,
                  "host_staged_count"_a = stats.host_staged_count, "host_staged_bytes"_a = stats.host_staged_bytes,
                  "waits"_a = std::move(waits), "cells"_a = std::move(cells));
}

py::list to_list(const rust::Vec<Record>& records) {
  py::list found;
  for (const Record& record : records) found.append(to_dict(record));
  return found;
}

void bind_observation(py::module_& module) {
  using Text = const std::string&;
  const auto named = [](Facts of) {
    py::list found;
    for (const Fact& fact : Core::facts(of)) found.append(text(fact.name));
    return py::tuple(std::move(found));
  };
  module.attr("KINDS") = named(Facts::kKinds);
  module.attr("DTYPES") = named(Facts::kDtypes);
  module.def("explain_work", torch::wrap_pybind_function(&explain_work), py::arg("work"));
  module.def("explain_without_group",
             torch::wrap_pybind_function([](Text kind, uint64_t bytes, Text dtype, size_t ranks, Text algorithm) {
               const OpDesc asked{-1, kind, bytes, dtype};
               return to_dict(checked([&] { return Core::choices(ranks, algorithm, {&asked, 1}); }).explained[0]);
             }),
             py::arg("kind"), py::arg("bytes"), py::arg("dtype"), py::arg("ranks"), py::arg("algorithm") = "");
  module.def("table_without_group", torch::wrap_pybind_function(&choices), py::arg("ranks"), py::arg("algorithm") = "");
  module.def("save_table", torch::wrap_pybind_function([](size_t ranks, Text made, Text lines) {
               return text(checked([&] { return Core::save_table(ranks, made, lines); }));
             }),
             py::arg("ranks"), py::arg("made"), py::arg("lines"));
  module.def("doctor", [] {
    rust::Vec<Fact> facts;
    {
      const py::gil_scoped_release no_gil;
      facts = Core::facts(Facts::kMachine);
    }
    py::dict found;
    for (const Fact& fact : facts) found[text(fact.name)] = text(fact.value);
    return found;
  });
}

}  // namespace sagellm
