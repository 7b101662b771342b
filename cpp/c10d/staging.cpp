// Tensors on a device without a library, carried by the CPU's engine or by a delegate: copied to host memory, moved or
// combined there, and copied back.
//
// The engine cannot use the memory of such tensors directly, and neither can it use the memory of strided tensors.
// Temporaries in host memory replace them (lower/plan.hpp); the core decides when the temporaries are filled and copied
// back. So the core keeps calls on the same memory in order, and a call has ended when its results are on the device. A
// delegate gets copies in place of the tensors, and a callback thread waits for the delegate. A thread that issues a
// later call on the same memory first waits for the earlier call.
//
// Streams: issuing a call waits for the work on this rank's current stream, never for another rank. So copies may be
// made later, on a stream of the group, by any thread that drives the operation. The copies wait for the device, so
// work that is enqueued after the end of the call finds the results, on any stream.
#include <ATen/EmptyTensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <utility>

#include "c10d/backend.hpp"
#include "host/errors.hpp"
#include "work/callbacks.hpp"

namespace sagellm {

namespace {

// The Work of a call that a delegate carries; a callback thread ends it.
class CarriedWork final : public SageWork {
 public:
  CarriedWork(int rank, const CallDesc& call, std::shared_ptr<Events> events, std::chrono::milliseconds timeout,
              c10::intrusive_ptr<Work> inner)
      : SageWork(rank, call.label.type, call.outputs.flat(), std::move(events), nullptr, Known{0, timeout}),
        inner_(std::move(inner)) {}

  int sourceRank() const override { return inner_->sourceRank(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  const c10::intrusive_ptr<Work> inner_;
};

}  // namespace

void SageBackend::tell_of_staging(c10::Device device) {
  static std::atomic<bool> warned{false};
  if (told_of_staging_.exchange(true)) return;
  constexpr uint8_t kWarning = 2;
  constexpr uint8_t kInfo = 3;
  const std::string text =
      c10::str("group ", options_->group_name, ": tensors on ", device,
               " travel through host memory, which is slow: they are copied to the host and back, and the host waits "
               "for the device; because ",
               device_reason(device.type()));
  log_line(warned.exchange(true) ? kInfo : kWarning, text);
}

void SageBackend::wait_for_stream(const char* op, c10::Device device) {
  const c10::Stream stream = current_stream(device);
  // If torch cannot tell whether the stream is being captured, `synchronize` below fails with the runtime's own error.
  if (capture_of(stream).value_or(false)) {
    value_error(op,
                c10::str("the current stream of ", device,
                         " is being captured into a graph, which cannot hold a call that travels through host memory (",
                         device_reason(device.type()), "); make the call outside of the capture"));
  }
  tell_of_staging(device);
  c10::Event now(device.type());
  now.record(stream);
  now.synchronize();
}

SageBackend::WorkPtr SageBackend::through_host(const CallDesc& call, c10::Device device) {
  if (delegated()) return through_host_by_delegate(call, device);
  Plans plans = lower(call, own_engine(device));
  wait_for_stream(call.op, device);
  for (Plan& plan : plans) {
    plan.call.host_staged = true;
    plan.copies_on = staging_streams_.side(device);
  }
  return submit(plans, call);
}

SageBackend::WorkPtr SageBackend::through_host_by_delegate(const CallDesc& call, c10::Device device) {
  refuse_forked();
  std::vector<Staged> before;
  std::vector<Staged> after;
  std::vector<Strided> touched;
  const Replaced host(call, [&](const at::Tensor& tensor, Role role) {
    at::Tensor copy(at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type()));
    if (role != Role::kWrite) before.push_back({copy, tensor});
    if (role != Role::kRead) after.push_back({copy, tensor});
    if (tensor.numel() > 0) touched.push_back(runs_of(tensor, role != Role::kRead));
    return copy;
  });
  wait_for_stream(call.op, device);
  DeferredRelease::instance().release();
  const c10::Stream side = staging_streams_.side(device);
  // A delegate does not order operations on the same memory, so wait for the earlier ones.
  side_calls_.follow_delegated(touched);
  {
    const c10::StreamGuard on(side);
    copy_staged(before, false);
  }
  WorkPtr inner = by_delegate(host.call(), true);
  if (!inner) {
    const c10::StreamGuard on(side);
    copy_staged(after, true);
    return nullptr;
  }
  // Only one thread waits for the delegate's work: gloo's works allow only one waiter, works of some backends have no
  // future, and other backends complete the future on their own threads.
  auto work = c10::make_intrusive<CarriedWork>(getRank(), call, events_, options_->timeout, inner);
  side_calls_.add_delegated(work, std::move(touched));
  return in_background(std::move(work), true, [inner, after = std::move(after), side] {
    inner->wait(kNoTimeout);
    const c10::StreamGuard on(side);
    copy_staged(after, true);
  });
}

}  // namespace sagellm
