// A device for tests, as torch's PrivateUse1: its memory is host memory, its streams are truly asynchronous, and its
// kernels are slow. Code that does not order two streams, or frees memory too early, gets wrong numbers.
//
// - `copy_` between two of its tensors, `fill_`, `zero_`, `add_`, `mul_` and `div_` are kernels: each is put on the
//   current stream, sleeps there, and then works on raw addresses without holding a reference. All other operators fall
//   back to the CPU, which waits for the current stream.
// - When memory is freed, a kernel on the stream on which it was allocated overwrites it with a pattern. The next
//   allocation of the same size on that stream gets this memory again, as with caching allocators. So a stream that was
//   not made to wait reads the pattern.
// - With a host queue, kernels, records and waits first enter a queue on the host, and another thread issues them
//   later. Only a query of a stream waits for that queue. Some vendors' torch plug-ins have such a queue.
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#include "runtime.hpp"

namespace sim {

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int kPool = 8;
constexpr unsigned char kPoison = 0xDB;

Runtime runtime = own::runtime();

// The test sets these before the first kernel; all threads read them.
std::atomic<int64_t> kernel_delay_us{0};
std::atomic<int64_t> host_delay_us{-1};  // negative: no host queue
std::atomic<bool> native_handles{true};
std::atomic<int> capturing{0};
// Whether the guard reports a capture.
std::atomic<int> tells_captures{1};
std::atomic<int64_t> kernels{0};

thread_local int current_device = 0;

void sleep_us(int64_t us) {
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

// While the gate is shut no kernel begins. So a host thread that waits for a kernel hangs, and all others continue.
class Gate {
 public:
  void set(bool shut) {
    std::lock_guard<std::mutex> lock(mutex_);
    shut_ = shut;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !shut_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool shut_ = false;
};

// Each kernel holds this lock while it uses torch. When the process ends, the lock is taken for ever, so that no kernel
// runs after that.
std::shared_mutex& alive() {
  static auto* one = new std::shared_mutex();
  return *one;
}

Gate& gate() {
  static auto* one = new Gate();
  return *one;
}

// ------------------------------------------------------------------------------------------------ the host queue

// One queue for all streams, first in first out.
class HostQueue {
 public:
  void push(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) std::thread([this] { serve(); }).detach();
    started_ = true;
    tasks_.push_back(std::move(task));
    ++outstanding_;
    changed_.notify_all();
  }

  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return outstanding_ == 0; });
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      sleep_us(host_delay_us);
      task();
      lock.lock();
      --outstanding_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  size_t outstanding_ = 0;
  bool started_ = false;
};

HostQueue& host_queue() {
  static auto* queue = new HostQueue();
  return *queue;
}

// The device is always set, because in some runtimes a thread has no device before it selects one.
void on_device(int device, const std::function<void()>& call) {
  runtime.set_device(device);
  call();
  if (current_device != device) runtime.set_device(current_device);
}

// Makes a call to the runtime now or, if there is a host queue, later.
void queued(int device, std::function<void()> call) {
  if (host_delay_us < 0) return on_device(device, call);
  host_queue().push([device, call = std::move(call)] {
    runtime.set_device(device);
    call();
  });
}

void drain() {
  if (host_delay_us >= 0) host_queue().drain();
}

// ------------------------------------------------------------------------------------------------ streams and events

struct Streams {
  std::mutex mutex;
  std::vector<void*> raw[kDevices];  // by stream id; made when first used
  int next[kDevices] = {};
};

Streams& streams() {
  static auto* all = new Streams();
  return *all;
}

thread_local c10::StreamId current_stream[kDevices] = {};

void* raw_stream(int device, c10::StreamId id) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  auto& list = streams().raw[device];
  if (list.size() <= static_cast<size_t>(id)) list.resize(static_cast<size_t>(id) + 1);
  void*& raw = list[static_cast<size_t>(id)];
  if (raw == nullptr) on_device(device, [&] { raw = runtime.stream_create(); });
  return raw;
}

void* raw_stream(const c10::Stream& stream) {
  return raw_stream(stream.device_index(), stream.id());
}

void* raw_current(int device) {
  return raw_stream(device, current_stream[device]);
}

// The data of a `c10::Event`. Its record may still be in the host queue.
struct Recorded {
  void* raw = nullptr;
  int device = 0;
  std::shared_ptr<std::atomic<int>> queued = std::make_shared<std::atomic<int>>(0);
};

// `c10::Event::eventId()` must be the raw event; this table has the other data of the event.
struct Events {
  std::mutex mutex;
  std::map<void*, Recorded> known;
};

Events& events() {
  static auto* all = new Events();
  return *all;
}

Recorded recorded(void* event) {
  std::lock_guard<std::mutex> lock(events().mutex);
  const auto found = events().known.find(event);
  // An event that was made elsewhere counts as recorded.
  return found == events().known.end() ? Recorded{event, current_device} : found->second;
}

void launch(int device, void* stream, std::function<void()> kernel) {
  ++kernels;
  auto* held = new std::function<void()>(std::move(kernel));
  queued(device, [stream, held] {
    runtime.launch(
        stream,
        [](void* argument) {
          auto* call = static_cast<std::function<void()>*>(argument);
          (*call)();
          delete call;
        },
        held);
  });
}

void synchronize(int device, void* stream) {
  drain();
  on_device(device, [&] { runtime.stream_sync(stream); });
}

// With CUDA's lazy loading the first launch of a kernel loads it, and loading may wait until the device is idle. When
// this is turned on, loading always waits until the simulated device is idle, and no query is answered meanwhile.
class Kernels {
 public:
  void lazy(bool on) {
    std::lock_guard<std::mutex> lock(mutex_);
    lazy_ = on;
    loaded_.clear();
  }
  void load(const char* name, int device) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!lazy_ || !loaded_.insert(name).second) return;
    }
    std::vector<void*> raw;
    {
      std::lock_guard<std::mutex> lock(streams().mutex);
      raw = streams().raw[device];
    }
    std::lock_guard<std::mutex> lock(loading_);
    for (void* stream : raw) {
      if (stream != nullptr) synchronize(device, stream);
    }
  }
  void wait() { std::lock_guard<std::mutex> lock(loading_); }

 private:
  std::mutex mutex_;
  bool lazy_ = false;
  std::set<std::string> loaded_;
  // Held while a kernel is loaded.
  std::mutex loading_;
};

Kernels& kernels_known() {
  static auto* all = new Kernels();
  return *all;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    if (!device.has_index()) return;
    TORCH_CHECK(device.index() < kDevices, "there is no device ", device);
    current_device = device.index();
    runtime.set_device(current_device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
    runtime.set_device(current_device);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  static c10::Stream named(c10::StreamId id, c10::Device device) {
    const auto index = device.has_index() ? device.index() : static_cast<c10::DeviceIndex>(current_device);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return named(current_stream[device.has_index() ? device.index() : current_device], device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return named(0, device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    std::lock_guard<std::mutex> lock(streams().mutex);
    return named(1 + streams().next[device.has_index() ? device.index() : current_device]++ % kPool, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStreamFromGlobalPool(device, false); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    if (!native_handles) return DeviceGuardImplInterface::getStreamNativeHandle(stream);
    return raw_stream(stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    const int device = stream.device_index();
    Recorded made;
    {
      std::lock_guard<std::mutex> lock(events().mutex);
      if (*event == nullptr) {
        on_device(device, [&] { *event = runtime.event_create(); });
        events().known[*event] = {*event, device};
      }
      made = events().known.at(*event);
    }
    ++*made.queued;
    queued(device, [made, raw = raw_stream(stream)] {
      runtime.event_record(made.raw, raw);
      --*made.queued;
    });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    queued(stream.device_index(), [event, raw = raw_stream(stream)] { runtime.event_wait(event, raw); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    kernels_known().wait();
    const Recorded found = recorded(event);
    if (*found.queued > 0) return false;
    bool done = false;
    on_device(found.device, [&] { done = runtime.event_query(event); });
    return done;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    drain();
    on_device(recorded(event).device, [&] { runtime.event_sync(event); });
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    synchronizeEvent(first);
    synchronizeEvent(second);
    return runtime.event_elapsed(first, second);
  }
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    if (event == nullptr) return;
    {
      std::lock_guard<std::mutex> lock(events().mutex);
      events().known.erase(event);
    }
    queued(device, [event] { runtime.event_destroy(event); });
  }
  bool queryStream(const c10::Stream& stream) const override {
    drain();
    bool idle = false;
    // A query of a stream that is being captured would break the capture.
    if (capturing > 0) return idle;
    on_device(stream.device_index(), [&] { idle = runtime.stream_query(raw_stream(stream)); });
    return idle;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(stream.device_index(), raw_stream(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    std::vector<void*> all;
    {
      std::lock_guard<std::mutex> lock(streams().mutex);
      all = streams().raw[device];
    }
    for (void* stream : all) {
      if (stream != nullptr) synchronize(device, stream);
    }
  }
  // In newer versions of torch this overrides a function of the base class.
  bool isStreamCapturing(const c10::Stream&) const { return capturing > 0 && tells_captures > 0; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};

const Guard guard;
const bool guard_registered = [] {
  c10::impl::registerDeviceGuard(kType, &guard);
  return true;
}();

// ------------------------------------------------------------------------------------------------ memory

struct Block {
  void* address;
  size_t bytes;
  int device;
  c10::StreamId stream;             // the stream on which it was allocated
  std::set<c10::StreamId> used_on;  // further streams that use it
};

// Blocks are never returned to the process, so that a late kernel reads the pattern and does not crash.
class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device;
    const c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0) return {nullptr, nullptr, &release, where};
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_WITH(OutOfMemoryError, given_out_ < limit_, "the simulated device is out of memory");
    const c10::StreamId stream = current_stream[device];
    auto& reusable = free_[{device, stream, bytes}];
    Block* block = nullptr;
    if (reusable.empty()) {
      block = new Block{c10::alloc_cpu(bytes), bytes, device, stream, {}};
    } else {
      block = reusable.back();
      reusable.pop_back();
    }
    ++given_out_;
    return {block->address, block, &release, where};
  }

  // Sets the largest number of blocks that may be in use.
  void limit(int64_t blocks) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = blocks;
  }

  // The number of blocks in use.
  int64_t given_out() {
    std::lock_guard<std::mutex> lock(mutex_);
    return given_out_;
  }

  void used(void* context, c10::StreamId stream) {
    if (context == nullptr) return;
    std::lock_guard<std::mutex> lock(mutex_);
    static_cast<Block*>(context)->used_on.insert(stream);
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }

 private:
  static void release(void* context) {
    if (context != nullptr) instance().take_back(static_cast<Block*>(context));
  }

  void take_back(Block* block) {
    void* own = raw_stream(block->device, block->stream);
    // The allocation's stream waits for the other streams that were recorded as users of the block.
    for (const c10::StreamId other : block->used_on) {
      if (other == block->stream) continue;
      void* theirs = raw_stream(block->device, other);
      queued(block->device, [own, theirs] {
        void* event = runtime.event_create();
        runtime.event_record(event, theirs);
        runtime.event_wait(event, own);
        runtime.event_destroy(event);
      });
    }
    block->used_on.clear();
    launch(block->device, own, [block] { std::memset(block->address, kPoison, block->bytes); });
    std::lock_guard<std::mutex> lock(mutex_);
    free_[{block->device, block->stream, block->bytes}].push_back(block);
    --given_out_;
  }

  std::mutex mutex_;
  int64_t given_out_ = 0;
  int64_t limit_ = std::numeric_limits<int64_t>::max();
  std::map<std::tuple<int, c10::StreamId, size_t>, std::vector<Block*>> free_;

 public:
  static Memory& instance() {
    static auto* memory = new Memory();
    return *memory;
  }
};

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  Memory::instance().used(data.get_context(), stream.id());
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { guard.setDevice({kType, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return guard.exchangeDevice({kType, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr data = Memory::instance().allocate(bytes);
    synchronize(current_device, raw_current(current_device));
    if (storage.nbytes() > 0) std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(kType, &Memory::instance());
  return true;
}();

// ------------------------------------------------------------------------------------------------ operators

// The tensor's memory as a CPU tensor, which does not keep the memory alive.
at::Tensor on_host(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!tensor.device().is_privateuseone()) return tensor;
  void* memory = const_cast<void*>(tensor.unsafeGetTensorImpl()->storage().data());
  at::Tensor flat = at::from_blob(memory, {static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize())},
                                  at::TensorOptions().dtype(tensor.scalar_type()));
  at::Tensor seen = at::native::as_strided_tensorimpl(flat, tensor.sizes(), tensor.strides(), tensor.storage_offset());
  seen._set_conj(tensor.is_conj());
  seen._set_neg(tensor.is_neg());
  return seen;
}

// Puts a kernel on the current stream of the tensor's device.
void kernel(const char* name, const at::Tensor& tensor, std::function<void()> body) {
  const int device = tensor.device().index();
  kernels_known().load(name, device);
  launch(device, raw_current(device), [body = std::move(body), delay = kernel_delay_us.load()] {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;
    gate().pass();
    sleep_us(delay);
    const std::shared_lock<std::shared_mutex> running(alive());
    body();
  });
}

void wait_for_current(const at::Tensor& tensor) {
  synchronize(tensor.device().index(), raw_current(tensor.device().index()));
}

at::Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<at::Device> device, std::optional<bool>,
                               std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard on(device.value_or(c10::Device(kType)));
  return at::detail::empty_generic(size, &Memory::instance(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard on(device.value_or(c10::Device(kType)));
  return at::detail::empty_strided_generic(size, stride, &Memory::instance(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  const at::Tensor& ours = to.device().is_privateuseone() ? to : from;
  const c10::DeviceGuard on(ours.device());
  kernel("copy", ours, [source = on_host(from), target = on_host(to)] { target.copy_(source); });
  // As with pageable memory, the call returns only when the host's memory has been read or written.
  if (from.device().is_cpu() || to.device().is_cpu()) wait_for_current(ours);
  return to;
}

// Copies the tensors of a whole list.
void foreach_copy(at::TensorList to, at::TensorList from, bool) {
  for (size_t i = 0; i < to.size(); ++i) {
    if (!to[i].device().is_privateuseone() || !from[i].device().is_privateuseone()) {
      to[i].copy_(from[i]);
      continue;
    }
    const c10::DeviceGuard on(to[i].device());
    kernel("foreach copy", to[i], [source = on_host(from[i]), target = on_host(to[i])] { target.copy_(source); });
  }
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  wait_for_current(tensor);
  return on_host(tensor).item();
}

at::Tensor& fill_scalar(at::Tensor& tensor, const at::Scalar& value) {
  kernel("fill", tensor, [target = on_host(tensor), value] { target.fill_(value); });
  return tensor;
}

at::Tensor& zero(at::Tensor& tensor) {
  return fill_scalar(tensor, 0);
}

// The other operand. A number on the CPU is read now.
at::Tensor operand(const at::Tensor& other) {
  return other.device().is_privateuseone() ? on_host(other) : other.clone();
}

at::Tensor& add(at::Tensor& tensor, const at::Tensor& other, const at::Scalar& alpha) {
  kernel("add", tensor, [target = on_host(tensor), right = operand(other), alpha] { target.add_(right, alpha); });
  return tensor;
}

at::Tensor& mul(at::Tensor& tensor, const at::Tensor& other) {
  kernel("mul", tensor, [target = on_host(tensor), right = operand(other)] { target.mul_(right); });
  return tensor;
}

at::Tensor& div(at::Tensor& tensor, const at::Tensor& other) {
  kernel("div", tensor, [target = on_host(tensor), right = operand(other)] { target.div_(right); });
  return tensor;
}

const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard on(tensor.device());
  const size_t needed = static_cast<size_t>(c10::multiply_integers(size)) * tensor.itemsize();
  const size_t offset = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  if (tensor.storage().nbytes() < needed + offset) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed + offset);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, std::move(source), offset, size, stride);
}

at::Tensor& set_source(at::Tensor& tensor, at::Storage source) {
  return at::native::set_(tensor, std::move(source));
}

at::Tensor as_strided(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

at::Tensor view(const at::Tensor& tensor, at::IntArrayRef size) {
  return at::native::view(tensor, size);
}

at::Tensor reshape_alias(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(tensor, size, stride);
}

at::Tensor unfold(const at::Tensor& tensor, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(tensor, dimension, size, step);
}

at::Tensor view_as_real(const at::Tensor& tensor) {
  return at::native::view_as_real(tensor);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty_memory_format);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &unfold);
  library.impl("view_as_real", &view_as_real);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage", &set_source);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_foreach_copy_", &foreach_copy);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("fill_.Scalar", &fill_scalar);
  library.impl("zero_", &zero);
  library.impl("add_.Tensor", &add);
  library.impl("mul_.Tensor", &mul);
  library.impl("div_.Tensor", &div);
}

// A copy reads and writes lazily conjugated and negated tensors directly; otherwise torch would resolve them first, by
// a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Created after the operators were registered, so it is destroyed before they are.
struct Leaving {
  ~Leaving() { alive().lock(); }
} leaving;

template <class Body>
const char* refusal(const Body& body) {
  thread_local std::string why;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    why = error.what();
    return why.c_str();
  }
}

}  // namespace

}  // namespace sim

// ------------------------------------------------------------------------------------------------ what Python calls

extern "C" {

using namespace sim;

void sim_set_kernel_delay(int64_t us) {
  kernel_delay_us = us;
}
// Negative: no host queue.
void sim_set_host_delay(int64_t us) {
  drain();
  host_delay_us = us;
}
void sim_set_lazy_kernels(int on) {
  kernels_known().lazy(on != 0);
}
void sim_set_native_handles(int on) {
  native_handles = on != 0;
}
// The kernels of vendors' libraries do not pass the gate. So one of our kernels waits there on the current stream, and
// holds up the work behind it. Otherwise a library's call could run, and end, while the device is held.
void sim_hold(int on) {
  gate().set(on != 0);
  if (on != 0) launch(current_device, raw_current(current_device), [] { gate().pass(); });
}
void sim_set_capturing(int on, int told) {
  capturing = on;
  tells_captures = told;
}
int64_t sim_kernels() {
  return kernels;
}
void sim_limit_blocks(int64_t blocks) {
  Memory::instance().limit(blocks);
}
int64_t sim_blocks() {
  return Memory::instance().given_out();
}
int sim_device_count() {
  return kDevices;
}
int sim_current_device() {
  return current_device;
}
void sim_set_device(int device) {
  guard.setDevice({kType, static_cast<c10::DeviceIndex>(device)});
}
// Returns null, or the text of the error, because no exception may pass through ctypes. The text belongs to the thread
// until the thread's next call.
const char* sim_synchronize(int device) {
  return refusal([&] { guard.synchronizeDevice(static_cast<c10::DeviceIndex>(device)); });
}
// Call it before the first stream is made.
const char* sim_use_library(const char* path, const char* flavour) {
  return refusal([&] { runtime = library::open(path, flavour); });
}
}
