//! Handles the first uses of a communicator. A library does not connect ranks when a communicator is made, but when a
//! call first needs the connection. NCCL connects by algorithm for collectives (`NCCL_RUNTIME_CONNECT`) and by peer and
//! direction for messages; HCCL connects by operator. The launch of such a call blocks the host thread until the other
//! ranks launch theirs. The library takes no deadline for this, does not return on a signal, and does not notice a dead
//! peer. So if a launch may connect ranks, it runs on its own thread, and its caller waits for that thread
//! ([`within`]). The wait ends at the call's deadline, or earlier if a peer dies, a signal arrives or the group is
//! aborted. `Connected` records what was connected. Later launches run on the caller's thread, because they no longer
//! wait for a peer. When the two ranks of a pair make their message communicators, they also connect these
//! communicators in both directions (`making`), so that two ranks that both send first do not wait for each other.
//!
//! A library chooses its algorithm by size, so connections are recorded for each kind of collective and each class of
//! sizes. If a launch on the caller's thread blocks nevertheless, the watchdog ends it at its deadline
//! (`DeviceCall::look_at_launch`).

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use super::communicator::within;
use super::lock;
use super::lowered::{Lowered, Placed};
use super::lowering::Method;
use crate::error::Result;
use crate::types::{Kind, Span};

/// The peer's rank in the communicator, and whether this rank sends to it (true) or receives from it (false).
type Way = (u32, bool);

/// What is already connected in a communicator.
#[derive(Default)]
pub(super) struct Connected {
    /// For each kind of operation, a bit for each class of sizes. The thread that waited for a launch sets bits after
    /// the launch has returned; other threads read them before they launch. Relaxed, because if a thread misses a set
    /// bit, the only effect is that a launch gets a separate thread without need.
    kinds: [AtomicU32; Kind::ALL.len() + 1],
    ways: Mutex<BTreeSet<Way>>,
    /// Every direction to every peer is connected, so `ways` does not have to be locked. Relaxed for the same reason as
    /// `kinds`.
    whole: AtomicBool,
}

/// What a launch will connect.
#[derive(Default)]
pub(super) struct Missing {
    kinds: Vec<(Kind, u32)>,
    ways: Vec<Way>,
}

impl Missing {
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty() && self.ways.is_empty()
    }
}

/// Sizes within a factor of 4 are one class.
fn class(bytes: u64) -> u32 {
    1 << (bytes.max(1).ilog2() / 2)
}

impl Connected {
    /// Returns the connections that these calls need and that no earlier launch has made. `me` is this rank; `ranks` is
    /// the size of the communicator.
    pub fn missing(&self, calls: &[Lowered], placed: &[Placed], (me, ranks): (u32, u32)) -> Missing {
        let mut missing = Missing::default();
        if ranks < 2 {
            return missing;
        }
        let mut ways = Vec::new();
        for (call, place) in calls.iter().zip(placed) {
            let kind = call.lowering.kind;
            if call.lowering.method != Method::Exchange {
                let class = class(call.bytes);
                if self.kinds[kind as usize].load(Ordering::Relaxed) & class == 0 {
                    missing.kinds.push((kind, class));
                }
            }
            // If a library has gather and scatter, it implements them with messages.
            let rooted = matches!(kind, Kind::Gather | Kind::Scatter);
            if (rooted || call.lowering.method == Method::Exchange) && !self.whole.load(Ordering::Relaxed) {
                call.ways(place, (me, ranks), &mut ways);
            }
        }
        if !ways.is_empty() {
            let known = lock(&self.ways);
            ways.retain(|way| !known.contains(way));
            missing.ways = ways;
        }
        missing
    }

    /// Records the connections that a launch has made.
    pub fn add(&self, found: Missing, ranks: u32) {
        for (kind, class) in found.kinds {
            self.kinds[kind as usize].fetch_or(class, Ordering::Relaxed);
        }
        let mut known = lock(&self.ways);
        known.extend(found.ways);
        if known.len() == 2 * (ranks as usize - 1) {
            self.whole.store(true, Ordering::Relaxed);
        }
    }

    /// Records that one direction between the two ranks of a pair is connected.
    pub fn add_way(&self, way: Way) {
        self.add(Missing { kinds: Vec::new(), ways: vec![way] }, 2);
    }
}

impl Lowered {
    /// Adds to `ways` the messages of this call on rank `me`, except empty messages and messages to itself.
    fn ways(&self, place: &Placed, (me, ranks): (u32, u32), ways: &mut Vec<Way>) {
        let (send, recv) = self.memory(place);
        let all = |spans: &[Span]| spans.iter().any(|span| span.bytes > 0);
        // `spans` has one span for each rank, or one for all ranks.
        let some = |spans: &[Span], rank: u32| match spans {
            [] => false,
            [whole] => whole.bytes > 0,
            _ => spans.get(rank as usize).is_some_and(|span| span.bytes > 0),
        };
        let others = || (0..ranks).filter(|rank| *rank != me);
        let root = self.root;
        match self.lowering.kind {
            Kind::Send if root != me && all(&send) => ways.push((root, true)),
            Kind::Recv if root != me && all(&recv) => ways.push((root, false)),
            Kind::Send | Kind::Recv => (),
            Kind::Gather if me != root => ways.extend(all(&send).then_some((root, true))),
            Kind::Scatter if me != root => ways.extend(all(&recv).then_some((root, false))),
            kind => {
                let to = others().filter(|rank| kind != Kind::Gather && some(&send, *rank)).map(|rank| (rank, true));
                let from =
                    others().filter(|rank| kind != Kind::Scatter && some(&recv, *rank)).map(|rank| (rank, false));
                ways.extend(to.chain(from));
            }
        }
    }
}

/// Runs `launch` on a new thread, because it may wait for other ranks. Then waits for that thread. An error of `go_on`
/// ends the wait. The thread is then left behind, and its launch returns when the communicator ends.
pub(super) fn watched(
    what: &str,
    patience: Duration,
    go_on: &dyn Fn() -> Result<()>,
    launch: impl FnOnce() -> Result<()> + Send + 'static,
) -> Result<()> {
    // `go_on` knows the deadline and returns the error that names the missing ranks. The limit here matters only if
    // `go_on` does not end the wait.
    const SPARE: Duration = Duration::from_secs(10);
    within(patience + SPARE, what, go_on, launch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::device::Vendor;
    use crate::engine::device::layout::{Buffers, Layout};
    use crate::engine::device::lowering::{LoweringInput, lower};
    use crate::types::{Dtype, ReduceOp};

    const HERE: Placed = Placed { factor: 0, send: 0x1000, recv: 0x2000 };

    /// A call of rank 0 of three ranks, with blocks of `block` bytes.
    fn call(vendor: Vendor, kind: Kind, root: u32, block: usize) -> Lowered {
        let all = Span { addr: 0x10_0000, bytes: 3 * block };
        let one = Span { addr: 0x20_0000, bytes: block };
        let (inputs, outputs) = match kind {
            Kind::Send => (vec![one], vec![]),
            Kind::Recv => (vec![], vec![one]),
            Kind::Gather => (vec![one], if root == 0 { vec![all] } else { vec![] }),
            Kind::AllToAll => (vec![all], vec![Span { addr: 0x40_0000, ..all }]),
            _ => (vec![one], vec![one]),
        };
        let op = ReduceOp::Sum;
        let asked = LoweringInput { kind, dtype: Dtype::F32, op, ranks: 3, equal_counts: true, dense: true };
        let lowering = lower(&asked, &vendor.capabilities()).unwrap();
        let buffers = Buffers { inputs: &inputs, outputs: &outputs, in_blocks: &[], out_blocks: &[] };
        let layout = Layout::of(kind, Dtype::F32, 3, &buffers, &lowering);
        let (name, bytes) = (kind.name().into(), block as u64);
        Lowered { name, kind, root, peer: root, tensors: 1, bytes, lowering, layout }
    }

    fn is_new(own: &Connected, calls: &[Lowered]) -> bool {
        let missing = own.missing(calls, &vec![HERE; calls.len()], (0, 3));
        let new = !missing.is_empty();
        own.add(missing, 3);
        new
    }

    #[test]
    fn a_kind_is_new_once_for_each_class_of_sizes() {
        let own = Connected::default();
        let reduce = |bytes| [call(Vendor::Nccl, Kind::AllReduce, 0, bytes)];
        for (bytes, new) in
            [(4, true), (12, false), (4, false), (16, true), (60, false), (1 << 30, true), (1 << 20, true)]
        {
            assert_eq!(is_new(&own, &reduce(bytes)), new, "{bytes}");
        }
        assert!(is_new(&own, &[call(Vendor::Nccl, Kind::Broadcast, 0, 4)]));
        assert!(!is_new(&own, &reduce(1 << 20)));
    }

    #[test]
    fn messages_are_new_by_peer_and_direction_whatever_they_belong_to() {
        let own = Connected::default();
        let of = |kind, root| call(Vendor::Hccl, kind, root, 8);
        assert!(is_new(&own, &[of(Kind::Send, 1), of(Kind::Recv, 2)]));
        assert!(!is_new(&own, &[of(Kind::Send, 1)]), "of any size");
        assert!(is_new(&own, &[of(Kind::Send, 1), of(Kind::Recv, 1)]));
        assert!(!is_new(&own, &[of(Kind::Gather, 0)]), "HCCL has none: it receives from both");
        assert!(!is_new(&own, &[of(Kind::Gather, 1)]) && is_new(&own, &[of(Kind::Gather, 2)]));
        assert!(own.whole.load(Ordering::Relaxed), "no set is asked any more");
        assert!(!is_new(&own, &[of(Kind::Send, 2)]));
    }

    #[test]
    fn one_rank_alone_connects_nothing() {
        let missing = Connected::default().missing(&[call(Vendor::Nccl, Kind::AllReduce, 0, 8)], &[HERE], (0, 1));
        assert!(missing.is_empty());
    }
}
