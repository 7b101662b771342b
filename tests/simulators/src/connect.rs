//! The first use of a communicator. Its libraries connect ranks not when a communicator is made but when a call first
//! needs that: NCCL by algorithm for collectives (`NCCL_RUNTIME_CONNECT`) and by peer and direction for messages, HCCL by
//! operator. The thread that calls waits there until the other ranks have come to the same point: no stream is involved,
//! no error is reported meanwhile, and the death of a peer is not noticed. An abort ends the wait, and so does the limit.
//!
//! Of CNCL nothing is known, so it is taken to do the same. A collective connects all ranks by kind, once for small and
//! once for large data, as another algorithm does; gathers, scatters and all-to-alls are messages.

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

/// From this size on a collective has another algorithm.
const LARGE: usize = 1 << 20;
/// How often a wait looks for the other ranks.
const LOOK: Duration = Duration::from_millis(1);
/// How long the process that serves the store stays for ranks that have not looked.
const STAY: Duration = Duration::from_secs(5);

/// A connection: its name, which both sides know, and which side a rank is.
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

    /// Set when the side `by` has seen that `of` has come.
    fn seen(&self, by: &str, of: &str) -> String {
        format!("connect/{}/{by} saw {of}", self.name)
    }
}

/// What a rank waits for.
pub struct Connecting<'a> {
    comm: &'a Comm,
    sides: BTreeSet<Side>,
}

/// Says that this rank has come to the first use of what `calls` need; nothing where all of it is connected.
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
    /// Returns when the other ranks have come.
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

    /// The store ends with the process that serves it, so that process stays until the others have looked: real libraries
    /// need no store by then. A rank that has ended meanwhile will not look.
    fn stay_until_seen(&self, store: Option<&Client>) {
        let end = Instant::now() + STAY;
        let unseen = |side: &Side| !has(store, &side.seen(&side.other, &side.own));
        while self.sides.iter().any(unseen) && !self.comm.is_aborted() && Instant::now() < end {
            std::thread::sleep(LOOK);
        }
    }
}

/// A store that has ended with its process has no answer, as a peer that has ended has none.
fn has(store: Option<&Client>, key: &str) -> bool {
    matches!(store.map(|store| store.try_get(key)), Some(Ok(Some(_))))
}

/// Where the variable asks for it, the caller of a launch waits here until its communicator is aborted.
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
