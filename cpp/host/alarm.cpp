#include "host/alarm.hpp"

#include <sys/syscall.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <tuple>
#include <utility>

#include "compat.hpp"

namespace sagellm {

namespace {

// For this long after a thread has got the failure of one group, failures of other groups count as having the same
// cause.
constexpr auto kSameCause = std::chrono::seconds(2);

// The system id of the thread that the caller named, then the system id and Python's identifier of the thread that gets
// the exception.
using Target = std::tuple<pid_t, pid_t, unsigned long>;

}  // namespace

Alarm::Error Alarm::keep(PyObject* error) {
  Py_INCREF(error);
  // If the last reference is dropped without the GIL, or after the interpreter has ended, the class is leaked.
  return {error, [](PyObject* kept) {
            if (python_alive() && PyGILState_Check() != 0) Py_DECREF(kept);
          }};
}

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
  const py::object prepare = py::module_::import("torch_sagellm._private.failure").attr("prepare");
  const auto [targets, error] = py::cast<std::pair<std::vector<Target>, py::object>>(prepare(asked, text));
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < threads.size() && !stopped_; ++i) {
    const auto& [given, told, number] = targets[i];
    if (knows(given) || knows(told)) continue;
    Slot& slot = slots_[told];
    if (threads[i].issued <= slot.raised && Clock::now() - slot.raised < kSameCause) continue;
    slot.number = number;
    if (PyThreadState_SetAsyncExc(number, error.ptr()) > 0) slot.groups[group] = keep(error.ptr());
  }
}

void Alarm::take_back(uint64_t group) {
  const pid_t me = this_thread();
  const auto is_raised = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto slot = slots_.find(me);
    return slot != slots_.end() && slot->second.groups.count(group) > 0;
  };
  if (!is_raised() || !python_alive()) return;
  // While this thread holds the GIL, no other thread raises an exception in it. No pending exception becomes active
  // either, because this thread runs no bytecode.
  const py::gil_scoped_acquire gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  Slot& slot = slots_[me];
  const auto own = slot.groups.find(group);
  if (own == slot.groups.end()) return;
  const Error error = std::move(own->second);
  slot.groups.erase(own);
  // The pending exception may be a different one: the failure of another group, or an exception that the program itself
  // raises here.
  if (PyThreadState_Get()->async_exc != error.get()) return;
  PyThreadState_SetAsyncExc(slot.number, slot.groups.empty() ? nullptr : slot.groups.begin()->second.get());
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
  slot->second.before.clear();
  slot->second.raised = {};
  PyThreadState_SetAsyncExc(slot->second.number, error);
}

void Alarm::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
}

}  // namespace sagellm
