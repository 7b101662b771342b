#include "device/probe.hpp"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/Exceptions.h>

#include <memory>
#include <utility>
#include <vector>

#include "device/streams.hpp"
#include "device/work.hpp"
#include "host/errors.hpp"

namespace sagellm {

namespace {

// What the test fills in; the first five are `RawStreams`.
struct Table {
  void (*set_device)(int device);
  void* (*stream)(int device);
  void (*wait)(void* stream, void* event);
  void* (*record)(void* stream);
  void (*release)(void* event);
  // Puts on the stream: copy `bytes` from one address to the other.
  void (*launch)(void* stream, const void* from, void* to, size_t bytes);
};

class TableStreams final : public RawStreams {
 public:
  explicit TableStreams(const Table* table) : table_(table) {}
  void set_device(c10::DeviceIndex device) const override { table_->set_device(device); }
  void* stream(c10::DeviceIndex device, int) const override { return table_->stream(device); }
  void wait(void* stream, void* event) const override { table_->wait(stream, event); }
  void* record(void* stream) const override { return table_->record(stream); }
  void release(void* event) const override { table_->release(event); }

 private:
  const Table* const table_;
};

// A group of one whose every operation copies its inputs to its outputs, on a raw stream.
class Echo {
 public:
  explicit Echo(size_t table)
      : table_(reinterpret_cast<const Table*>(table)), streams_(std::make_shared<TableStreams>(table_)) {}

  // `scale` is a factor that torch's own operators apply before and after, on the stream of the operation.
  c10::intrusive_ptr<c10d::Work> copy(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
                                      bool async, bool blocks_host, double scale) {
    if (inputs.empty() || inputs.size() != outputs.size()) value_error("echo", "expected as many inputs as outputs");
    const c10::Device device = inputs[0].device();
    const c10::DeviceGuard guard(device);
    Passage passage = streams_.begin(device, async, events_->timing());
    std::vector<at::Tensor> keep(inputs);
    keep.insert(keep.end(), outputs.begin(), outputs.end());
    std::vector<at::Tensor> sources;
    {
      const at::NoGradGuard no_grad;
      const c10::StreamGuard on(passage.stream());
      for (const at::Tensor& input : inputs) sources.push_back(scale == 1 ? input : input.clone().mul_(scale));
    }
    keep.insert(keep.end(), sources.begin(), sources.end());
    void* raw = passage.enter();
    for (size_t i = 0; i < sources.size(); ++i) {
      table_->launch(raw, sources[i].const_data_ptr(), outputs[i].mutable_data_ptr(), sources[i].nbytes());
    }
    passage.leave();
    if (scale != 1) {
      const at::NoGradGuard no_grad;
      const c10::StreamGuard on(passage.stream());
      for (const at::Tensor& output : outputs) output.div_(scale);
    }
    DeviceWork::Launched launched{passage.stream(), passage.begun(), passage.end(), std::move(keep)};
    launched.blocks_host = blocks_host;
    launched.watched.number = ++number_;
    auto work = c10::make_intrusive<DeviceWork>(0, blocks_host ? c10d::OpType::BARRIER : c10d::OpType::ALLREDUCE,
                                                outputs, events_, nullptr, std::move(launched));
    work->watch();
    return work;
  }

  void time() { events_->enable_timing(); }

 private:
  const Table* const table_;
  DeviceStreams streams_;
  const std::shared_ptr<Events> events_ = std::make_shared<Events>();
  uint64_t number_ = 0;
};

}  // namespace

void bind_device_probe(py::module_& module) {
  py::class_<Echo, std::shared_ptr<Echo>>(module, "_Echo")
      .def(py::init<size_t>(), py::arg("table"))
      .def("copy", torch::wrap_pybind_function(&Echo::copy), py::arg("inputs"), py::arg("outputs"), py::arg("async_op"),
           py::arg("blocks_host") = false, py::arg("scale") = 1.0, py::call_guard<py::gil_scoped_release>())
      .def("time", &Echo::time);
}

}  // namespace sagellm
