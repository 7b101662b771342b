//! The first use of a communicator. The libraries connect ranks not when a communicator is made, but when a call first
//! needs the connection. NCCL connects by algorithm for collectives (`NCCL_RUNTIME_CONNECT`) and by peer and direction
//! for messages, HCCL by operator. The calling thread waits until the other ranks have reached the same point. No
//! stream is involved, no error is reported meanwhile, and the death of a peer is not noticed. An abort ends the wait,
//! and so does the time limit.
//!
//! For CNCL the behaviour is not known, so it is assumed to be the same. A collective connects all ranks by its kind,
//! once for small and once for large data, because large data uses a different algorithm. Gathers, scatters and
//! all-to-alls are messages.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sagellm::error::{Error, Result};
use sagellm::host::Store;
use sagellm::types::Kind;

use crate::bootstrap::Client;
use crate::call::Call;
use crate::comm::{Comm, Vendor};
use crate::settings;
use crate::trace;

/// From this size on, in bytes, a collective uses the algorithm for large data.
const LARGE: usize = 1 << 20;
/// Interval at which a wait checks for the other ranks.
const LOOK: Duration = Duration::from_millis(1);
/// How long the process that serves the store waits for ranks that have not checked yet.
const STAY: Duration = Duration::from_secs(5);

/// One end of a connection: the name of the connection, which both ends know, and the names of this and the other end.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Side {
    name: String,
    own: String,
    other: String,
}

impl Side {
    fn key(&self, side: &str) -> String {
        format!("connect/{}/{side}", self.name)
    }

    /// Key that is set when the end `by` has seen that the end `of` is there.
    fn seen(&self, by: &str, of: &str) -> String {
        format!("connect/{}/{by} saw {of}", self.name)
    }
}

/// The connections for which a rank waits.
pub struct Connecting<'a> {
    comm: &'a Comm,
    sides: BTreeSet<Side>,
}

/// Announces that this rank has reached the first use of the connections that `calls` need. `None` if all are
/// connected.
pub fn begin<'a>(comm: &'a Comm, calls: &[Call]) -> Result<Option<Connecting<'a>>> {
    if settings::get().eager || comm.size < 2 {
        return Ok(None);
    }
    let mut sides: BTreeSet<Side> = calls.iter().flat_map(|call| sides_of(comm, call)).collect();
    let known = comm.connected.lock().unwrap().clone();
    sides.retain(|side| !known.contains(&side.key(&side.other)));
    if sides.is_empty() {
        return Ok(None);
    }
    std::thread::sleep(settings::get().connect_takes);
    let store = comm.place.connect()?;
    sides.iter().try_for_each(|side| store.set(&side.key(&side.own), b"here"))?;
    Ok(Some(Connecting { comm, sides }))
}

impl Connecting<'_> {
    /// Returns when the other ranks have reached the same point.
    pub fn wait(self) -> Result<()> {
        let Connecting { comm, sides } = &self;
        let settings = settings::get();
        let limit = if comm.vendor == Vendor::Hccl { settings.hccl_connect } else { settings.ceiling };
        let deadline = Instant::now() + limit.min(settings.ceiling);
        let store = comm.place.connect().ok();
        sides.iter().for_each(|side| trace::call(|| format!("connect {} rank={}", side.name, comm.rank)));
        let mut absent: Vec<&Side> = sides.iter().collect();
        loop {
            absent.retain(|side| {
                !has(store.as_ref(), &side.key(&side.other)) || {
                    if let Some(store) = &store {
                        let _ = store.set(&side.seen(&side.own, &side.other), b"seen");
                    }
                    comm.connected.lock().unwrap().insert(side.key(&side.other));
                    false
                }
            });
            let Some(first) = absent.first() else { break };
            if comm.is_aborted() {
                return Err(Error::aborted("simulator: aborted while its ranks connect"));
            }
            if Instant::now() >= deadline {
                let (name, rank) = (&first.name, comm.rank);
                return Err(Error::system(format!("simulator: rank {rank} was alone in the first use of {name}")));
            }
            std::thread::sleep(LOOK);
        }
        if comm.place.is_served_here() {
            self.stay_until_seen(store.as_ref());
        }
        Ok(())
    }

    /// Waits until the other ranks have seen that this rank is there. With a real library the program may end now, but
    /// here the store that this process serves would end with the program. The wait has a limit, because a dead rank
    /// never looks.
    fn stay_until_seen(&self, store: Option<&Client>) {
        let end = Instant::now() + STAY;
        let unseen = |side: &Side| !has(store, &side.seen(&side.other, &side.own));
        while self.sides.iter().any(unseen) && !self.comm.is_aborted() && Instant::now() < end {
            std::thread::sleep(LOOK);
        }
    }
}

/// Returns whether the store has the key. Also returns false if the store's process has ended: the store then does not
/// answer, like a peer that has ended.
fn has(store: Option<&Client>, key: &str) -> bool {
    matches!(store.map(|store| store.try_get(key)), Some(Ok(Some(_))))
}

/// If `SAGELLM_SIM_STUCK_AT` selects this launch, its caller waits here until the communicator is aborted.
pub fn stuck(comm: &Comm) -> Result<()> {
    static LAUNCHES: AtomicUsize = AtomicUsize::new(0);
    if LAUNCHES.fetch_add(1, Ordering::Relaxed) + 1 != settings::get().stuck_at {
        return Ok(());
    }
    let deadline = Instant::now() + settings::get().ceiling;
    while !comm.is_aborted() && Instant::now() < deadline {
        std::thread::sleep(LOOK);
    }
    Err(Error::aborted("simulator: a launch was stuck, as SAGELLM_SIM_STUCK_AT asks for"))
}

fn sides_of(comm: &Comm, call: &Call) -> Vec<Side> {
    let (me, root) = (comm.rank, call.root);
    let others = || (0..comm.size).filter(move |rank| *rank != me);
    let sends = |to: u32| Side { name: format!("message {me}-{to}"), own: "sends".into(), other: "receives".into() };
    let receives =
        |from: u32| Side { name: format!("message {from}-{me}"), own: "receives".into(), other: "sends".into() };
    match call.kind {
        Kind::Send | Kind::Recv if root == me => Vec::new(),
        Kind::Send => vec![sends(root)],
        Kind::Recv => vec![receives(root)],
        Kind::Gather if root == me => others().map(receives).collect(),
        Kind::Gather => vec![sends(root)],
        Kind::Scatter if root == me => others().map(sends).collect(),
        Kind::Scatter => vec![receives(root)],
        Kind::AllToAll => others().map(sends).chain(others().map(receives)).collect(),
        kind => {
            let sum = |spans: &[sagellm::types::Span]| spans.iter().map(|span| span.bytes).sum::<usize>();
            let size = if sum(&call.inputs).max(sum(&call.outputs)) < LARGE { "small" } else { "large" };
            let name = format!("{kind} {size}");
            let side = |rank| Side { name: name.clone(), own: me.to_string(), other: format!("{rank}") };
            others().map(side).collect()
        }
    }
}
