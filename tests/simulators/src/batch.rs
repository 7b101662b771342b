//! Group calls: the calls between a start and an end on one thread are collected, and then issued together.

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
    /// What the entry reports to NCCL's plug-ins, if anything.
    pub issued: Option<crate::nccl::Issued>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    Management,
    Collective,
    Message,
}

/// A communicator to be made at the end of the group. Returns the vendor's result code.
pub type Job = Box<dyn FnOnce() -> i32 + Send>;

#[derive(Default)]
pub struct Batch {
    pub depth: usize,
    pub entries: Vec<Entry>,
    pub jobs: Vec<Job>,
    /// Sort of the calls in the group; HCCL allows only one.
    pub sort: Option<Sort>,
    /// The first error of a call in the group. If it is not 0, nothing of the group is carried out.
    pub error: i32,
}

thread_local! {
    static BATCHES: [RefCell<Batch>; 3] = Default::default();
}

/// Calls `body` with this thread's batch of the vendor. `body` must not call functions of this module.
pub fn with<T>(vendor: Vendor, body: impl FnOnce(&mut Batch) -> T) -> T {
    BATCHES.with(|all| body(&mut all[vendor as usize].borrow_mut()))
}

pub fn open(vendor: Vendor) -> bool {
    with(vendor, |batch| batch.depth > 0)
}

/// Ends one level of nesting. Returns `None` if there was no level to end, otherwise the batch if this was the
/// outermost level.
pub fn end(vendor: Vendor) -> Option<Option<Batch>> {
    with(vendor, |batch| {
        batch.depth = batch.depth.checked_sub(1)?;
        Some((batch.depth == 0).then(|| std::mem::take(batch)))
    })
}

/// Ends one level and carries out the batch, for vendors whose calls do not continue after their group ends. `unpaired`
/// makes the result if there was no level to end, `failed` the result if the ranks do not connect.
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

/// Runs all jobs at the same time. Returns the first result that is not 0.
pub fn run_jobs(mut jobs: Vec<Job>) -> i32 {
    if jobs.len() == 1 {
        return jobs.remove(0)();
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = jobs.into_iter().map(|job| scope.spawn(job)).collect();
        // A panic in a job has already been printed. The vendors have no result code for it, so it counts as 1.
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

/// The error that a failed operation leaves on its stream. Only HCCL, which cannot abort, breaks the stream.
fn stream_error(vendor: Vendor, fault: Fault) -> Option<i32> {
    const TASK_TIMEOUT: i32 = 507_048;
    const REMOTE_ERROR: i32 = 507_057;
    match (vendor, fault) {
        (_, Fault::None) | (Vendor::Nccl | Vendor::Cncl, _) => None,
        (Vendor::Hccl, Fault::Timeout) => Some(TASK_TIMEOUT),
        (Vendor::Hccl, _) => Some(REMOTE_ERROR),
    }
}

/// Issues operations when their ranks are connected; operations of one communicator are issued together. Those run on
/// the first of their streams: after earlier work and before later work of their other streams.
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
    // Start all connections before the first wait.
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

/// Orders two streams: work issued on `later` from now on runs after all work that was issued on `first`.
fn order(first: &Arc<Stream>, later: &Arc<Stream>) {
    let event = Event::new(first.device, 0, false);
    event.record_on(first);
    event.wait_on(later);
}
