#include "work/delegated.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "host/errors.hpp"
#include "host/per_process.hpp"
#include "work/callbacks.hpp"
#include "work/steps.hpp"

namespace sagellm {

namespace {

// Records the failure and returns the error to report: the core's, if it knows what the call waited for, else
// `failure`.
std::exception_ptr told(const DelegatedWork::Note& note, const std::exception_ptr& failure) {
  const rust::String more = (*note)->failed(rust::String::lossy(text_of(coded_text(failure))));
  return more.empty() ? failure : to_exception(std::string(more));
}

// True if the delegate rejected the arguments, which leaves its group as it was. gloo reports trouble with other ranks
// or the store by a different exception class, or by an exception of its library. MPI and UCC use one class for
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

// The groups that have had a dropped message.
struct DroppedMessages::All {
  std::mutex mutex;
  std::vector<std::weak_ptr<DroppedMessages>> groups;
};

void DroppedMessages::end_all() {
  std::vector<std::weak_ptr<DroppedMessages>> groups;
  {
    auto& all = per_process<All>();
    const std::lock_guard<std::mutex> lock(all.mutex);
    groups.swap(all.groups);
  }
  for (const auto& each : groups) {
    if (const auto group = each.lock()) group->end();
  }
}

void DroppedMessages::keep(WorkPtr work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ended_) return;
  works_.push_back(std::move(work));
  if (serving_) return;
  serving_ = true;
  {
    auto& all = per_process<All>();
    const std::lock_guard<std::mutex> all_lock(all.mutex);
    const auto gone = [](const auto& group) { return group.expired(); };
    all.groups.erase(std::remove_if(all.groups.begin(), all.groups.end(), gone), all.groups.end());
    all.groups.push_back(weak_from_this());
  }
  CallbackPool::instance().post([self = shared_from_this()] { self->serve(); });
}

void DroppedMessages::serve() {
  // Longer than any group lives: at a deadline gloo closes the connection, with all other messages on it.
  constexpr auto kForEver = std::chrono::hours(24 * 365);
  CallbackPool::about_to_block();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!works_.empty()) {
    WorkPtr first = works_.front();
    lock.unlock();
    try {
      first->wait(kForEver);
    } catch (const std::exception&) {
      // The peer is gone or the group has failed: nobody waits for this message.
    }
    first.reset();
    lock.lock();
    if (works_.empty()) break;
    first = std::move(works_.front());
    works_.pop_front();
    lock.unlock();
    first.reset();  // may take the GIL
    lock.lock();
  }
  serving_ = false;
  served_.notify_all();
}

void DroppedMessages::end() {
  std::unique_lock<std::mutex> lock(mutex_);
  ended_ = true;
  // All Works are aborted, so a wait that begins later also returns immediately.
  for (const WorkPtr& work : works_) work->abort();
  served_.wait_for(lock, std::chrono::seconds(2), [this] { return !serving_; });
}

DelegatedWork::DelegatedWork(int rank, c10d::OpType type, WorkPtr work, Note note, std::chrono::milliseconds timeout,
                             std::shared_ptr<DroppedMessages> dropped)
    : JoinedWork(rank, type, std::vector<WorkPtr>{work}),
      work_(std::move(work)),
      note_(std::move(note)),
      timeout_(timeout),
      dropped_(std::move(dropped)) {
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
  // If the Work has a future, the future's callback records the end. Without one, nothing sees the end of a Work that
  // is dropped before a wait.
  if (inner_) return;
  (*note_)->ended_unseen();
  const auto type = retrieveOpType();
  const bool message = type == c10d::OpType::SEND || type == c10d::OpType::RECV || type == c10d::OpType::RECVANYSOURCE;
  if (!message || waited_.load(std::memory_order_relaxed) || inherited()) return;
  try {
    dropped_->keep(work_);
  } catch (const std::exception&) {
    // No memory or no thread is left: the message is lost with its Work, as it would be in a gloo group.
  }
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
    struct Ended {
      std::atomic<bool>& waited;
      ~Ended() { waited.store(true, std::memory_order_relaxed); }
    } const ended{waited_};
    const bool well = work_->wait(!inner_ && timeout == kNoTimeout && timeout_.count() > 0 ? timeout_ : timeout);
    // Without a future, the call may have ended long before this wait.
    if (!inner_) (*note_)->ended_unseen();
    return well;
  } catch (const std::exception&) {
    const std::exception_ptr failure = std::current_exception();
    // If only this wait's timeout has passed, the call still runs and has not failed. Without a future these two cases
    // look the same.
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
