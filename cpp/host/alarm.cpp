#include "host/alarm.hpp"

#include <sys/syscall.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <tuple>
#include <utility>

#include "compat.hpp"

namespace sagellm {

namespace {

// How long the failure of one group stands for that of others.
constexpr auto kSameCause = std::chrono::seconds(2);

// Which thread is told, in place of the one that was asked for.
using Target = std::tuple<pid_t, pid_t, unsigned long>;

}  // namespace

pid_t Alarm::this_thread() {
  return static_cast<pid_t>(::syscall(SYS_gettid));
}

void Alarm::raise(uint64_t group, const std::vector<Thread>& threads, const std::string& text,
                  const std::function<bool(pid_t)>& knows) {
  if (!python_alive()) return;
  const py::gil_scoped_acquire gil;
  std::vector<pid_t> asked;
  asked.reserve(threads.size());
  for (const Thread& thread : threads) asked.push_back(thread.id);
  const py::object prepare = py::module_::import("torch_sagellm._failure").attr("prepare");
  const auto [targets, error] = py::cast<std::pair<std::vector<Target>, py::object>>(prepare(asked, text));
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < threads.size() && !stopped_; ++i) {
    const auto& [given, told, number] = targets[i];
    if (knows(given) || knows(told)) continue;
    Slot& slot = slots_[told];
    if (threads[i].issued <= slot.raised && Clock::now() - slot.raised < kSameCause) continue;
    slot.number = number;
    if (PyThreadState_SetAsyncExc(number, error.ptr()) > 0) slot.groups.insert(group);
  }
}

void Alarm::take_back(uint64_t group) {
  const pid_t me = this_thread();
  const auto is_last = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto slot = slots_.find(me);
    return slot != slots_.end() && slot->second.groups.erase(group) > 0 && slot->second.groups.empty();
  };
  if (!is_last() || !python_alive()) return;
  // With the GIL no other thread raises anything here, and this one runs no bytecode before it returns.
  const py::gil_scoped_acquire gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  const Slot& slot = slots_[me];
  if (slot.groups.empty()) PyThreadState_SetAsyncExc(slot.number, nullptr);
}

void Alarm::raised() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto slot = slots_.find(this_thread());
  if (slot == slots_.end()) return;
  slot->second.before = std::exchange(slot->second.groups, {});
  slot->second.raised = Clock::now();
}

void Alarm::raise_again(PyObject* error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto slot = slots_.find(this_thread());
  if (slot == slots_.end() || stopped_) return;
  slot->second.groups.insert(slot->second.before.begin(), slot->second.before.end());
  slot->second.raised = {};
  PyThreadState_SetAsyncExc(slot->second.number, error);
}

void Alarm::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
}

}  // namespace sagellm
