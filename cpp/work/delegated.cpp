#include "work/delegated.hpp"

#include <string>
#include <utility>

#include "host/errors.hpp"
#include "work/steps.hpp"

namespace sagellm {

namespace {

// Records the failure and returns the error to report: the core's, if it knows what the call waited for, else
// `failure`.
std::exception_ptr told(const DelegatedWork::Note& note, const std::exception_ptr& failure) {
  // Without the first letter, which is the code of the error's kind.
  const std::string words = coded_text(failure).substr(1);
  const rust::String more = (*note)->failed(rust::String::lossy(words));
  return more.empty() ? failure : to_exception(std::string(more));
}

// True if the delegate's check of the arguments threw, which leaves its group as it was. gloo reports trouble with
// other ranks or the store by another class, or by an exception of its library. MPI and UCC use one class for
// everything.
bool is_refusal(const std::exception_ptr& failure, const std::string& delegate) {
  if (delegate != "gloo") return false;
  try {
    std::rethrow_exception(failure);
  } catch (const c10::DistError&) {
    return false;
  } catch (const c10::Error&) {
    return true;
  } catch (...) {
    return false;
  }
}

// While this object exists, the core knows that this thread waits for the call.
class Waiting {
 public:
  explicit Waiting(const DelegatedWork::Note& note) : note_(note) { (*note_)->wait_begins(); }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  ~Waiting() { (*note_)->wait_ends(); }

 private:
  const DelegatedWork::Note& note_;
};

}  // namespace

DelegatedWork::DelegatedWork(int rank, c10d::OpType type, WorkPtr work, Note note, std::chrono::milliseconds timeout)
    : JoinedWork(rank, type, std::vector<WorkPtr>{work}),
      work_(std::move(work)),
      note_(std::move(note)),
      timeout_(timeout) {
  try {
    inner_ = work_->getFuture();
  } catch (const std::exception&) {
    // Some works have no future: gloo's sends and receives.
  }
  if (!inner_) return;
  inner_->addCallback([note = note_, done = done_](c10::ivalue::Future& ended) {
    if (ended.hasError()) {
      told(note, ended.exception_ptr());
    } else {
      (*note)->ended();
      done->store(true, std::memory_order_release);
    }
  });
}

DelegatedWork::~DelegatedWork() {
  // Without a future, the end of a Work that is dropped before a wait is not seen. With one, its callback records the
  // end.
  if (!inner_) (*note_)->ended_unseen();
}

void DelegatedWork::not_issued(const Note& note, const std::string& delegate) {
  const std::exception_ptr failure = std::current_exception();
  if (!is_refusal(failure, delegate)) std::rethrow_exception(told(note, failure));
  (*note)->refused();
  std::rethrow_exception(failure);
}

std::exception_ptr DelegatedWork::exception() const {
  const std::exception_ptr failure = work_->exception();
  return failure ? told(note_, failure) : nullptr;
}

bool DelegatedWork::wait(std::chrono::milliseconds timeout) {
  const InCall in_call;
  const bool done = done_->load(std::memory_order_acquire);
  if (inherited()) {
    if (!done) raise(ErrorKind::kInvalid, kInherited);
    return true;  // `work_->wait` would take a lock, which a thread of the parent may have held at the fork
  }
  if (done) return work_->wait(timeout);
  const Waiting waiting(note_);
  try {
    const bool well = work_->wait(!inner_ && timeout == kNoTimeout && timeout_.count() > 0 ? timeout_ : timeout);
    // Without a future, the call may have ended long before this wait.
    if (!inner_) (*note_)->ended_unseen();
    return well;
  } catch (const std::exception&) {
    const std::exception_ptr failure = std::current_exception();
    // If only this wait's timeout has passed, the call still runs and has not failed. Without a future the two look the
    // same.
    if (is_interrupt(failure) || (inner_ && !inner_->completed())) throw;
    std::rethrow_exception(told(note_, failure));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> DelegatedWork::getFuture() {
  if (!inner_) return work_->getFuture();
  if (inherited()) {
    auto failed = c10::make_intrusive<c10::ivalue::Future>(inner_->elementType(), inner_->devices());
    failed->setError(to_exception(coded(ErrorKind::kInvalid, kInherited)));
    return failed;
  }
  const std::lock_guard<std::mutex> lock(future_mutex_);
  if (outer_) return outer_;
  outer_ = c10::make_intrusive<c10::ivalue::Future>(inner_->elementType(), inner_->devices());
  inner_->addCallback([note = note_, outer = outer_, held = StepMeter::holds_future()](c10::ivalue::Future& ended) {
    if (ended.hasError()) return outer->setError(told(note, ended.exception_ptr()));
    outer->markCompleted(ended.value(), ended.storages());
  });
  return outer_;
}

}  // namespace sagellm
