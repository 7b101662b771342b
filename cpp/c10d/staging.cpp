#include "c10d/staging.hpp"

#include <c10/core/Event.h>

#include "host/errors.hpp"
#include "host/host.hpp"

namespace sagellm {

void Staging::tell_once(c10::Device device) {
  static std::atomic<bool> warned{false};
  if (told_.exchange(true)) return;
  constexpr uint8_t kWarning = 2;
  constexpr uint8_t kInfo = 3;
  const std::string text =
      c10::str("group ", options_.group_name, ": tensors on ", device,
               " travel through host memory, which is slow: they are copied to the host and back, and the host waits "
               "for the device; because ",
               vendors_.missing(device.type()));
  log_line(warned.exchange(true) ? kInfo : kWarning, text);
}

void Staging::wait_for_stream(const char* op, c10::Device device) {
  const c10::Stream stream = current_stream(device);
  // If torch cannot tell whether the stream is being captured, `synchronize` below fails with the runtime's own error.
  if (capture_of(stream).value_or(false)) {
    value_error(op,
                c10::str("the current stream of ", device,
                         " is being captured into a graph, which cannot hold a call that travels through host memory (",
                         vendors_.missing(device.type()), "); make the call outside of the capture"));
  }
  tell_once(device);
  c10::Event now(device.type());
  now.record(stream);
  now.synchronize();
}

}  // namespace sagellm
