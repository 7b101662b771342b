//! Keeps pending operations by the memory that they use, and finds those that a later operation must follow (rule 4)
//! without checking each of them.
//!
//! An operation is found by its extent, which is the address range that contains all its memory. There is one map for
//! each power of two. It has the extents whose length is at least that power and less than twice as much, sorted by
//! address. So a range can overlap an extent in a map only if the extent starts less than twice the map's power before
//! the range. Operations with equal extents share an entry. An operation that writes the whole extent replaces all
//! operations in its entry: it follows all of them, so an operation that follows it follows them too. If there are few
//! operations, they are kept in a list and checked one by one, which is faster and allocates nothing.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::Op;

/// The list that is checked one by one has at most this many operations.
const FEW: usize = 16;

#[derive(Default)]
pub struct PendingOps {
    few: Vec<Arc<Op>>,
    /// The operations by their extent. The outer key is the number of bits in the extent's length; the inner key is the
    /// extent's first address and its length.
    by_length: BTreeMap<u32, BTreeMap<(usize, usize), Place>>,
}

/// The operations with the same extent: the last one that writes all of it, those that read all of it, and those that
/// use parts of it. The keys of `readers` and `parts` are from `key`.
#[derive(Default)]
struct Place {
    writer: Option<Arc<Op>>,
    readers: HashMap<usize, Arc<Op>>,
    parts: HashMap<usize, Arc<Op>>,
}

impl Place {
    fn is_empty(&self) -> bool {
        self.writer.is_none() && self.readers.is_empty() && self.parts.is_empty()
    }
}

/// Identifies an operation as long as a reference to the operation exists.
pub fn key(op: &Op) -> usize {
    std::ptr::from_ref(op) as usize
}

impl PendingOps {
    pub fn is_empty(&self) -> bool {
        self.few.is_empty() && self.by_length.is_empty()
    }

    /// Adds an operation, which follows all operations here that conflict with it. The caller removes the operation
    /// when its memory is no longer used.
    pub fn add(&mut self, op: Arc<Op>) {
        let (from, to) = op.extent;
        if from >= to {
            return; // it uses no memory
        }
        if self.few.len() < FEW {
            return self.few.push(op);
        }
        let bytes = to - from;
        let place = self.by_length.entry(bits(bytes)).or_default().entry((from, bytes)).or_default();
        let request = &op.request;
        let plain = request.also_touched.is_empty();
        let whole = |spans: &[crate::types::Span]| matches!(spans, [one] if one.addr == from && one.bytes == bytes);
        if plain && whole(request.outputs()) {
            *place = Place { writer: Some(op), ..Place::default() };
        } else if plain && request.outputs().is_empty() && whole(request.inputs()) {
            place.readers.insert(key(&op), op);
        } else {
            place.parts.insert(key(&op), op);
        }
    }

    /// Removes an operation, if it is here.
    pub fn remove(&mut self, op: &Op) {
        if let Some(at) = self.few.iter().position(|other| key(other) == key(op)) {
            self.few.swap_remove(at);
            return;
        }
        let (from, to) = op.extent;
        let bytes = to.saturating_sub(from);
        let Some(places) = self.by_length.get_mut(&bits(bytes)) else { return };
        let Some(place) = places.get_mut(&(from, bytes)) else { return };
        if place.writer.as_ref().is_some_and(|writer| key(writer) == key(op)) {
            place.writer = None;
        }
        place.readers.remove(&key(op));
        place.parts.remove(&key(op));
        if place.is_empty() {
            places.remove(&(from, bytes));
            if places.is_empty() {
                self.by_length.remove(&bits(bytes));
            }
        }
    }

    /// Returns the operations here that `op` must follow. An operation can be missing if another one in the result
    /// already follows it.
    pub fn before(&self, op: &Op) -> Vec<Arc<Op>> {
        self.near(op).filter(|other| op.conflicts_with(other)).cloned().collect()
    }

    /// The operations here that may conflict with `op`.
    fn near(&self, op: &Op) -> impl Iterator<Item = &Arc<Op>> {
        let (from, to) = op.extent;
        let writes = !op.request.outputs().is_empty() || op.request.also_touched.iter().any(|strided| strided.written);
        let places = self.by_length.iter().filter(move |_| from < to).flat_map(move |(bits, places)| {
            let longest = usize::MAX >> (usize::BITS - bits);
            places.range((from.saturating_sub(longest), 0)..(to, 0)).filter(move |((at, bytes), _)| at + bytes > from)
        });
        self.few.iter().chain(places.flat_map(move |(_, place)| {
            let readers = place.readers.values().filter(move |_| writes);
            place.writer.iter().chain(readers).chain(place.parts.values())
        }))
    }
}

/// The number of bits of a length. Lengths with equal numbers of bits differ by less than a factor of two.
fn bits(bytes: usize) -> u32 {
    usize::BITS - bytes.leading_zeros()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::types::{Kind, Request, Span, Strided};

    struct Numbers(u64);

    impl Numbers {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) as usize % n
        }
    }

    /// A random operation. It uses one piece, two pieces, columns of a matrix, or no memory.
    fn drawn(numbers: &mut Numbers) -> Arc<Op> {
        // Half of the pieces are at a few fixed addresses, so that many are equal.
        let piece = |numbers: &mut Numbers| match numbers.below(2) {
            0 => Span { addr: 1 + 8 * numbers.below(12), bytes: 8 },
            _ => Span { addr: 1 + numbers.below(100), bytes: numbers.below(3) * numbers.below(9) },
        };
        let pieces = |numbers: &mut Numbers| (0..1 + numbers.below(3) / 2).map(|_| piece(numbers)).collect::<Vec<_>>();
        let (kind, inputs, outputs) = match numbers.below(3) {
            0 => (Kind::Send, pieces(numbers), Vec::new()),
            1 => (Kind::Recv, Vec::new(), pieces(numbers)),
            _ => (Kind::AllGather, pieces(numbers), pieces(numbers)),
        };
        let mut request = Request::of_addresses(kind, inputs, outputs);
        if numbers.below(4) == 0 {
            let (counts, strides) = ([1 + numbers.below(4), 1, 1, 1], [3 + numbers.below(4), 0, 0, 0]);
            let written = numbers.below(2) == 0;
            request.also_touched = vec![Strided { addr: 1 + numbers.below(50), run: 2, counts, strides, written }];
        }
        Arc::new(Op::new(request, 0, 0, Duration::from_secs(1), None))
    }

    /// Like an engine, the test adds each operation together with those that it follows, and removes it after those.
    #[test]
    fn rule_04_every_conflict_is_found_at_once_or_by_way_of_another_operation() {
        let mut numbers = Numbers(7);
        let (mut found, mut conflicts) = (0, 0);
        for _ in 0..30 {
            let mut here = PendingOps::default();
            // Each operation, with the keys of the operations that it follows.
            let mut pending: Vec<(Arc<Op>, Vec<usize>)> = Vec::new();
            let mut ended = Vec::new(); // kept, because a key is an address
            for _ in 0..100 {
                if numbers.below(4) == 0 && !pending.is_empty() {
                    let free =
                        |(_, after): &(Arc<Op>, Vec<usize>)| !pending.iter().any(|(op, _)| after.contains(&key(op)));
                    let gone = pending.iter().position(free).expect("the first one waits for none");
                    let (gone, _) = pending.remove(gone);
                    here.remove(&gone);
                    ended.push(gone);
                    continue;
                }
                let op = drawn(&mut numbers);
                let before = here.before(&op);
                assert!(before.iter().all(|other| op.conflicts_with(other)), "{:?} follows too many", op.request);
                let after: Vec<usize> = before.iter().map(|other| key(other)).collect();
                found += after.len();
                for (other, _) in &pending {
                    let expected = op.conflicts_with(other);
                    conflicts += usize::from(expected);
                    let mut reached = after.clone();
                    let mut at = 0;
                    while at < reached.len() {
                        let (_, next) = pending.iter().find(|(op, _)| key(op) == reached[at]).expect("pending");
                        let here = |next: &&usize| pending.iter().any(|(op, _)| key(op) == **next);
                        let new: Vec<usize> = next.iter().filter(here).copied().collect();
                        reached.extend(new.into_iter().filter(|next| !reached.contains(next)).collect::<Vec<_>>());
                        at += 1;
                    }
                    assert!(!expected || reached.contains(&key(other)), "{:?} after {:?}", op.request, other.request);
                }
                here.add(Arc::clone(&op));
                pending.push((op, after));
            }
            pending.iter().for_each(|(op, _)| here.remove(op));
            assert!(here.is_empty(), "something stays behind");
        }
        assert!(conflicts > found && found > 1000, "{found} of {conflicts}");
    }
    /// The operations receive into the rows of one tensor, send one tensor, and receive into one tensor.
    #[test]
    fn rule_04_as_many_operations_are_looked_at_as_are_in_the_way() {
        let op = |kind: Kind, span: Span| {
            let (inputs, outputs) = if kind == Kind::Send { (vec![span], vec![]) } else { (vec![], vec![span]) };
            Arc::new(Op::new(Request::of_addresses(kind, inputs, outputs), 0, 0, Duration::from_secs(1), None))
        };
        let count = 10_000;
        let mut here = PendingOps::default();
        let mut looks = 0;
        let mut post = |here: &mut PendingOps, op: Arc<Op>| {
            looks += here.near(&op).count();
            here.add(op);
        };
        for i in 0..count {
            post(&mut here, op(Kind::Recv, Span { addr: 1000 + i * 16, bytes: 16 }));
            post(&mut here, op(Kind::Send, Span { addr: 1 << 30, bytes: 100 }));
        }
        for _ in 0..count {
            post(&mut here, op(Kind::Recv, Span { addr: 1 << 40, bytes: 100 }));
        }
        assert!(looks < 3 * count * (FEW + 1), "{looks} looks for {} operations", 3 * count);
    }
}
