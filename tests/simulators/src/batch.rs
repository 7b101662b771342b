//! Group calls: between the start and the end on a thread everything is collected, and then issued at once.

use std::cell::RefCell;
use std::sync::Arc;

use sagellm::error::{Error, Result};

use crate::call::Call;
use crate::comm::{Comm, Fault, Vendor};
use crate::connect;
use crate::event::Event;
use crate::stream::{Stream, Task, Work};

#[derive(Clone)]
pub struct Entry {
    pub comm: Arc<Comm>,
    pub stream: Arc<Stream>,
    pub call: Call,
    /// What NCCL's plug-ins are told of it.
    pub issued: Option<crate::nccl::Issued>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    Management,
    Collective,
    Message,
}

/// Making a communicator, put off to the end of the group; the vendor's result.
pub type Job = Box<dyn FnOnce() -> i32 + Send>;

#[derive(Default)]
pub struct Batch {
    pub depth: usize,
    pub entries: Vec<Entry>,
    pub jobs: Vec<Job>,
    /// What the calls do; HCCL allows one sort in a group.
    pub sort: Option<Sort>,
    /// The first error of a call in the group; then nothing of it is done.
    pub error: i32,
}

thread_local! {
    static BATCHES: [RefCell<Batch>; 3] = Default::default();
}

/// This thread's group calls of a vendor. `body` must not call back in here.
pub fn with<T>(vendor: Vendor, body: impl FnOnce(&mut Batch) -> T) -> T {
    BATCHES.with(|all| body(&mut all[vendor as usize].borrow_mut()))
}

pub fn open(vendor: Vendor) -> bool {
    with(vendor, |batch| batch.depth > 0)
}

/// Ends one level; what was collected, if it was the outermost one, or `None` if there was none to end.
pub fn end(vendor: Vendor) -> Option<Option<Batch>> {
    with(vendor, |batch| {
        batch.depth = batch.depth.checked_sub(1)?;
        Some((batch.depth == 0).then(|| std::mem::take(batch)))
    })
}

/// Ends one level and does what was collected, for the vendors whose calls have returned when their group has. `unpaired`
/// says what is returned where there is none to end, `failed` where the ranks do not connect.
pub fn close(vendor: Vendor, unpaired: impl FnOnce() -> i32, failed: impl FnOnce(&Error) -> i32) -> i32 {
    let batch = match end(vendor) {
        None => return unpaired(),
        Some(None) => return 0,
        Some(Some(batch)) => batch,
    };
    if batch.error != 0 {
        return batch.error;
    }
    let result = if batch.jobs.is_empty() { 0 } else { run_jobs(batch.jobs) };
    if result != 0 {
        return result;
    }
    launch(batch.entries).map_or_else(|error| failed(&error), |()| 0)
}

/// Runs all jobs at the same time; the first result that is not 0.
pub fn run_jobs(mut jobs: Vec<Job>) -> i32 {
    if jobs.len() == 1 {
        return jobs.remove(0)();
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = jobs.into_iter().map(|job| scope.spawn(job)).collect();
        // A panic in one of them was printed; the vendors have no number for it.
        let results = threads.into_iter().map(|thread| thread.join().unwrap_or(1));
        results.fold(0, |first, result| if first == 0 { result } else { first })
    })
}

struct Launch {
    comm: Arc<Comm>,
    calls: Vec<Call>,
}

impl Work for Launch {
    fn issue(&self) -> Task {
        let (ticket, comm, calls) = (self.comm.ticket(), Arc::clone(&self.comm), self.calls.clone());
        Box::new(move || {
            let fault = comm.perform(ticket, &calls);
            stream_error(comm.vendor, fault)
        })
    }
}

/// What a failed operation leaves on its stream. Only HCCL, which cannot abort, breaks the stream.
fn stream_error(vendor: Vendor, fault: Fault) -> Option<i32> {
    const TASK_TIMEOUT: i32 = 507_048;
    const REMOTE_ERROR: i32 = 507_057;
    match (vendor, fault) {
        (_, Fault::None) | (Vendor::Nccl | Vendor::Cncl, _) => None,
        (Vendor::Hccl, Fault::Timeout) => Some(TASK_TIMEOUT),
        (Vendor::Hccl, _) => Some(REMOTE_ERROR),
    }
}

/// Issues operations, those of one communicator together, when their ranks are connected. They run on the first of their
/// streams, after what was issued on the others and before what will be.
pub fn launch(entries: Vec<Entry>) -> Result<()> {
    type Together = (Arc<Comm>, Vec<Arc<Stream>>, Vec<Call>);
    let mut comms: Vec<Together> = Vec::new();
    for Entry { comm, stream, call, .. } in entries {
        let at = comms.iter().position(|(other, _, _)| Arc::ptr_eq(other, &comm)).unwrap_or(comms.len());
        if at == comms.len() {
            comms.push((comm, Vec::new(), Vec::new()));
        }
        let (_, streams, calls) = &mut comms[at];
        if !streams.iter().any(|other| Arc::ptr_eq(other, &stream)) {
            streams.push(stream);
        }
        calls.push(call);
    }
    // All that is needed is asked for before the first wait.
    let connecting = comms.iter().map(|(comm, _, calls)| connect::begin(comm, calls)).collect::<Result<Vec<_>>>()?;
    connecting.into_iter().flatten().try_for_each(connect::Connecting::wait)?;
    comms.iter().try_for_each(|(comm, _, _)| connect::stuck(comm))?;
    for (comm, streams, calls) in comms {
        let (main, others) = streams.split_first().expect("each call has a stream");
        for other in others {
            order(other, main);
        }
        let work: Arc<dyn Work> = Arc::new(Launch { comm, calls });
        main.push(&work);
        for other in others {
            order(main, other);
        }
    }
    Ok(())
}

/// What is issued on `later` from now on comes after what was issued on `first`.
fn order(first: &Arc<Stream>, later: &Arc<Stream>) {
    let event = Event::new(first.device, 0, false);
    event.record_on(first);
    event.wait_on(later);
}
