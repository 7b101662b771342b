//! The first uses of a communicator. A library connects its ranks not when a communicator is made but when a call first needs
//! it: NCCL by algorithm for collectives (`NCCL_RUNTIME_CONNECT`) and by peer and direction for messages, HCCL by operator.
//! The launch of such a call then waits, on the host, until the other ranks have come to theirs; it takes no deadline, sees
//! no signal and does not notice a dead peer.
//!
//! So a launch that may connect runs on a thread of its own, for which its caller waits ([`within`]): until the deadline of
//! the call, and only as long as no peer dies, no signal comes and nobody aborts. What was connected is remembered, and later
//! launches go directly: nothing is left that would wait for a peer on the host. Messages of a pair have communicators of
//! their own, which are connected in both directions while they are made (`making`), so that two ranks that both send first
//! do not wait for each other.
//!
//! Which algorithm a library takes follows from the size, so a collective counts as another one for each class of sizes.
//! Where a launch waits all the same, the watch ends it at its deadline (`DeviceCall::look_at_launch`).

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

/// Whom a message goes to or comes from, in the communicator, and whether this rank sends it.
type Way = (u32, bool);

/// What of a communicator is connected.
#[derive(Default)]
pub(super) struct Connected {
    /// By kind, a bit for each class of sizes. Set by a launch that has returned, read before one; relaxed, because a
    /// launch that finds a bit missing only takes the longer way.
    kinds: [AtomicU32; Kind::ALL.len() + 1],
    ways: Mutex<BTreeSet<Way>>,
    /// All ways are, so that the set need not be asked. As `kinds`.
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
    /// What these calls need and no earlier launch has connected, for the rank `me` of `ranks` in the communicator.
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
            // Libraries that have gathers and scatters make messages of them.
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

    /// A launch has connected it.
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

    /// Messages from here to the other rank of a pair, or from there.
    pub fn add_way(&self, way: Way) {
        self.add(Missing { kinds: Vec::new(), ways: vec![way] }, 2);
    }
}

impl Lowered {
    /// The messages of which the call consists on the rank `me`, those to itself and empty ones excepted.
    fn ways(&self, place: &Placed, (me, ranks): (u32, u32), ways: &mut Vec<Way>) {
        let (send, recv) = self.memory(place);
        let all = |spans: &[Span]| spans.iter().any(|span| span.bytes > 0);
        // One span for each rank, or one for all.
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

/// Runs a launch that may wait for other ranks on a thread of its own. `go_on` gives the error that ends the wait; the
/// thread is left behind then, and the launch that it is in ends with its communicator.
pub(super) fn watched(
    what: &str,
    patience: Duration,
    go_on: &dyn Fn() -> Result<()>,
    launch: impl FnOnce() -> Result<()> + Send + 'static,
) -> Result<()> {
    // `go_on` knows the deadline, and gives the error that names who is missing. The time here is for where it fails.
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

    /// A call of rank 0 of three, with blocks of so many bytes.
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
        let (name, bytes) = (kind.name().to_string(), block as u64);
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
