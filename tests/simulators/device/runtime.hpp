// The streams and events of the test device, as a table of functions. Either the device's own threads implement them,
// or the C library of a simulated vendor; torch's streams then have the raw handles of that library.
#pragma once

#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace sim {

// Handles are opaque. A query is true if no work is pending. An event stands for its last record; a wait for an event
// that was never recorded returns immediately.
struct Runtime {
  void (*set_device)(int device) = nullptr;
  void* (*stream_create)() = nullptr;  // on the device of the calling thread; never destroyed
  bool (*stream_query)(void* stream) = nullptr;
  void (*stream_sync)(void* stream) = nullptr;
  void (*launch)(void* stream, void (*function)(void*), void* argument) = nullptr;
  void* (*event_create)() = nullptr;
  void (*event_record)(void* event, void* stream) = nullptr;
  void (*event_wait)(void* event, void* stream) = nullptr;
  bool (*event_query)(void* event) = nullptr;
  void (*event_sync)(void* event) = nullptr;
  double (*event_elapsed)(void* first, void* second) = nullptr;  // milliseconds
  void (*event_destroy)(void* event) = nullptr;
};

// ------------------------------------------------------------------------------------------------ threads of its own

namespace own {

using Clock = std::chrono::steady_clock;

// The state outlives the event's handle, because streams that wait for the event hold the state.
struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;  // number of requested records
  uint64_t reached = 0;   // number of the last record that its stream has reached
  Clock::time_point when;

  void wait(uint64_t record) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return reached >= record; });
  }
};

struct Event {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

inline thread_local int device = 0;

class Stream {
 public:
  explicit Stream(int on) : device(on) {
    std::thread([this] { serve(); }).detach();
  }

  void push(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    ++outstanding_;
    changed_.notify_all();
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return outstanding_ == 0;
  }

  void sync() {
    auto done = std::make_shared<EventState>();
    push([done] {
      std::lock_guard<std::mutex> lock(done->mutex);
      done->reached = 1;
      done->changed.notify_all();
    });
    done->wait(1);
  }

  const int device;

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
      --outstanding_;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  size_t outstanding_ = 0;
};

inline Stream& stream_of(void* handle) {
  auto* stream = static_cast<Stream*>(handle);
  // As in a real runtime, a handle is valid only on threads that have selected its device.
  if (stream->device != device) {
    throw std::runtime_error("a stream of device " + std::to_string(stream->device) +
                             " was used by a thread whose device is " + std::to_string(device));
  }
  return *stream;
}

inline Runtime runtime() {
  Runtime made;
  made.set_device = [](int index) { device = index; };
  made.stream_create = []() -> void* { return new Stream(device); };
  made.stream_query = [](void* stream) { return stream_of(stream).idle(); };
  made.stream_sync = [](void* stream) { stream_of(stream).sync(); };
  made.launch = [](void* stream, void (*function)(void*), void* argument) {
    stream_of(stream).push([function, argument] { function(argument); });
  };
  made.event_create = []() -> void* { return new Event(); };
  made.event_record = [](void* event, void* stream) {
    auto state = static_cast<Event*>(event)->state;
    uint64_t record = 0;
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      record = ++state->recorded;
    }
    stream_of(stream).push([state, record] {
      std::lock_guard<std::mutex> lock(state->mutex);
      state->reached = std::max(state->reached, record);
      state->when = Clock::now();
      state->changed.notify_all();
    });
  };
  made.event_wait = [](void* event, void* stream) {
    auto state = static_cast<Event*>(event)->state;
    uint64_t record = 0;
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      record = state->recorded;
    }
    stream_of(stream).push([state, record] { state->wait(record); });
  };
  made.event_query = [](void* event) {
    auto& state = *static_cast<Event*>(event)->state;
    std::lock_guard<std::mutex> lock(state.mutex);
    return state.reached >= state.recorded;
  };
  made.event_sync = [](void* event) {
    auto state = static_cast<Event*>(event)->state;
    std::unique_lock<std::mutex> lock(state->mutex);
    const uint64_t record = state->recorded;
    lock.unlock();
    state->wait(record);
  };
  made.event_elapsed = [](void* first, void* second) {
    const auto between = static_cast<Event*>(second)->state->when - static_cast<Event*>(first)->state->when;
    return std::chrono::duration<double, std::milli>(between).count();
  };
  made.event_destroy = [](void* event) { delete static_cast<Event*>(event); };
  return made;
}

}  // namespace own

// ------------------------------------------------------------------------------------ the C library of a simulation

namespace library {

inline void* handle = nullptr;

// A function of the library by its C name; null if the library lacks it.
template <class Function>
Function* symbol(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(handle, name));
}

template <class Function>
Function* needed(const char* name) {
  auto* found = symbol<Function>(name);
  if (found == nullptr) throw std::runtime_error(std::string("the library has no ") + name);
  return found;
}

inline void ok(const char* what, int code) {
  if (code != 0) throw std::runtime_error(std::string(what) + " gave " + std::to_string(code));
}

// Calls a function by its name. Looking it up for each call is slow, but the code is short, and this is a test.
template <class... Arguments>
int call(const char* name, Arguments... arguments) {
  return needed<int(Arguments...)>(name)(arguments...);
}

#define SIM_CALL(name, ...) ::sim::library::ok(name, ::sim::library::call(name, __VA_ARGS__))

inline Runtime acl() {
  if (auto* init = symbol<int(const char*)>("aclInit")) {
    const int code = init(nullptr);
    if (code != 0 && code != 100002) ok("aclInit", code);  // 100002: already initialised
  }
  Runtime made;
  made.set_device = [](int device) { SIM_CALL("aclrtSetDevice", static_cast<int32_t>(device)); };
  made.stream_create = []() -> void* {
    void* stream = nullptr;
    SIM_CALL("aclrtCreateStream", &stream);
    return stream;
  };
  made.stream_query = [](void* stream) {
    int32_t status = 1;
    SIM_CALL("aclrtStreamQuery", stream, &status);
    return status == 0;
  };
  made.stream_sync = [](void* stream) { SIM_CALL("aclrtSynchronizeStream", stream); };
  made.launch = [](void* stream, void (*function)(void*), void* argument) {
    SIM_CALL("aclrtLaunchHostFunc", stream, function, argument);
  };
  made.event_create = []() -> void* {
    void* event = nullptr;
    SIM_CALL("aclrtCreateEventExWithFlag", &event, static_cast<uint32_t>(1 | 8));
    return event;
  };
  made.event_record = [](void* event, void* stream) { SIM_CALL("aclrtRecordEvent", event, stream); };
  made.event_wait = [](void* event, void* stream) { SIM_CALL("aclrtStreamWaitEvent", stream, event); };
  made.event_query = [](void* event) {
    int32_t status = 0;
    SIM_CALL("aclrtQueryEventStatus", event, &status);
    return status == 1;
  };
  made.event_sync = [](void* event) { SIM_CALL("aclrtSynchronizeEvent", event); };
  made.event_elapsed = [](void* first, void* second) {
    float time = 0;
    SIM_CALL("aclrtEventElapsedTime", &time, first, second);
    return static_cast<double>(time);
  };
  made.event_destroy = [](void* event) { SIM_CALL("aclrtDestroyEvent", event); };
  return made;
}

inline Runtime cnrt() {
  Runtime made;
  made.set_device = [](int device) { SIM_CALL("cnrtSetDevice", device); };
  made.stream_create = []() -> void* {
    void* queue = nullptr;
    SIM_CALL("cnrtQueueCreate", &queue);
    return queue;
  };
  made.stream_query = [](void* queue) { return call("cnrtQueueQuery", queue) == 0; };
  made.stream_sync = [](void* queue) { SIM_CALL("cnrtQueueSync", queue); };
  made.launch = [](void* queue, void (*function)(void*), void* argument) {
    SIM_CALL("cnrtInvokeHostFunc", queue, function, argument);
  };
  made.event_create = []() -> void* {
    void* notifier = nullptr;
    SIM_CALL("cnrtNotifierCreate", &notifier);
    return notifier;
  };
  made.event_record = [](void* notifier, void* queue) { SIM_CALL("cnrtPlaceNotifier", notifier, queue); };
  made.event_wait = [](void* notifier, void* queue) { SIM_CALL("cnrtQueueWaitNotifier", notifier, queue, 0U); };
  made.event_query = [](void* notifier) { return call("cnrtQueryNotifier", notifier) == 0; };
  made.event_sync = [](void* notifier) { SIM_CALL("cnrtWaitNotifier", notifier); };
  made.event_elapsed = [](void* first, void* second) {
    float time = 0;
    SIM_CALL("cnrtNotifierElapsedTime", first, second, &time);
    return static_cast<double>(time);
  };
  made.event_destroy = [](void* notifier) { SIM_CALL("cnrtNotifierDestroy", notifier); };
  return made;
}

inline Runtime cuda() {
  SIM_CALL("cuInit", 0U);
  Runtime made;
  made.set_device = [](int device) {
    void* context = nullptr;
    SIM_CALL("cuDevicePrimaryCtxRetain", &context, device);
    SIM_CALL("cuCtxSetCurrent", context);
  };
  made.stream_create = []() -> void* {
    void* stream = nullptr;
    SIM_CALL("cuStreamCreate", &stream, 1U);  // not ordered with the default stream
    return stream;
  };
  made.stream_query = [](void* stream) { return call("cuStreamQuery", stream) == 0; };
  made.stream_sync = [](void* stream) { SIM_CALL("cuStreamSynchronize", stream); };
  made.launch = [](void* stream, void (*function)(void*), void* argument) {
    SIM_CALL("cuLaunchHostFunc", stream, function, argument);
  };
  made.event_create = []() -> void* {
    void* event = nullptr;
    SIM_CALL("cuEventCreate", &event, 0U);
    return event;
  };
  made.event_record = [](void* event, void* stream) { SIM_CALL("cuEventRecord", event, stream); };
  made.event_wait = [](void* event, void* stream) { SIM_CALL("cuStreamWaitEvent", stream, event, 0U); };
  made.event_query = [](void* event) { return call("cuEventQuery", event) == 0; };
  made.event_sync = [](void* event) { SIM_CALL("cuEventSynchronize", event); };
  made.event_elapsed = [](void* first, void* second) {
    float time = 0;
    SIM_CALL("cuEventElapsedTime", &time, first, second);
    return static_cast<double>(time);
  };
  made.event_destroy = [](void* event) { SIM_CALL("cuEventDestroy_v2", event); };
  return made;
}

#undef SIM_CALL

// `flavour` is "acl", "cnrt" or "cuda".
inline Runtime open(const std::string& path, const std::string& flavour) {
  handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) throw std::runtime_error(::dlerror());
  if (flavour == "acl") return acl();
  if (flavour == "cnrt") return cnrt();
  if (flavour == "cuda") return cuda();
  throw std::runtime_error("unknown kind of runtime: " + flavour);
}

}  // namespace library

}  // namespace sim
