//! Keeps the last operations of a group, one record for each; the oldest is overwritten first. The flight record and
//! the explanations of past operations use these records. A record is written at issue and completed when the operation
//! ends.

use std::sync::atomic::Ordering::Relaxed;

use crate::op::{FusedWith, NOBODY, Op, Route};
use crate::os::clock;
use crate::types::{CallNote, Dtype, Kind};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Pending,
    Done,
    Failed,
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            State::Pending => "pending",
            State::Done => "done",
            State::Failed => "failed",
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Record {
    /// Number of operations that the group had issued before this one.
    pub id: u64,
    /// Number in the group, or in the ordered pair of ranks for point to point (0 for a receive from `ANY_RANK`).
    pub number: u64,
    pub kind: Kind,
    /// The element type of a reduction. `Bytes` if data is only moved.
    pub dtype: Dtype,
    /// `ReduceOp::code`.
    pub op: u8,
    pub route: Route,
    pub state: State,
    /// Whether the operation did not end in the pass that issued it.
    pub blocked: bool,
    /// Whether the time of its end is known.
    pub timed: bool,
    pub note: CallNote,
    /// The root, or the peer of a message.
    pub root: u32,
    pub tag: u32,
    /// The rank for which the operation waited, or `NOBODY`.
    pub late: u32,
    /// Bytes that this rank's call reads. `written`: bytes that the call writes.
    pub read: u64,
    pub written: u64,
    /// Times of `clock::stamp`. `ended` is 0 while the operation is pending.
    pub issued: u64,
    pub ended: u64,
    /// Nanoseconds that copying and reducing took between issue and end.
    pub copying: u64,
    pub reducing: u64,
}

impl Record {
    const EMPTY: Record = Record {
        id: 0,
        number: 0,
        kind: Kind::Barrier,
        dtype: Dtype::Bytes,
        op: 0,
        route: Route { choice: 0, load: 0, fused_with: FusedWith::ALONE },
        state: State::Pending,
        blocked: false,
        timed: true,
        note: CallNote { counts: true, tensors: 1, element: CallNote::NO_TYPE, site: 0, host_staged: false },
        root: 0,
        tag: 0,
        late: NOBODY,
        read: 0,
        written: 0,
        issued: 0,
        ended: 0,
        copying: 0,
        reducing: 0,
    };

    /// The record of an operation that has just been numbered.
    #[inline(always)]
    pub fn of(op: &Op) -> Record {
        let request = &op.request;
        Record {
            number: op.number,
            kind: request.kind,
            dtype: request.dtype,
            op: request.op.code(),
            note: request.note,
            root: request.root,
            tag: request.tag,
            read: op.read,
            written: op.written,
            issued: op.issued,
            ..Record::EMPTY
        }
    }

    /// Records that the operation ended at the stamp `at`. A message always waits for its peer.
    #[inline]
    pub fn end(&mut self, op: &Op, well: bool, at: u64) {
        let timing = &op.timing;
        self.state = if well { State::Done } else { State::Failed };
        self.ended = at;
        (self.route, self.blocked) = (op.route(), timing.blocked());
        self.late = match self.kind {
            Kind::Send => self.root,
            Kind::Recv => u32::try_from(op.source()).unwrap_or(self.root),
            _ => timing.late(),
        };
        self.copying = timing.copying.load(Relaxed);
        self.reducing = timing.reducing.load(Relaxed);
    }

    /// A record for an operation that the core does not run itself. It is issued now.
    pub fn external_op(kind: Kind, choice: u64, number: u64, (root, tag): (u32, u32), note: CallNote) -> Record {
        let route = Route { choice, ..Route::default() };
        Record { number, kind, route, note, root, tag, issued: clock::stamp(), ..Record::EMPTY }
    }

    /// The path's one-byte code, which is part of the choice.
    pub fn path(&self) -> u8 {
        self.route.choice as u8
    }
    pub fn reason(&self) -> u8 {
        (self.route.choice >> 8) as u8
    }

    /// Nanoseconds from issue to end.
    pub fn took(&self) -> u64 {
        self.ended.saturating_sub(self.issued)
    }

    /// Nanoseconds that were neither copying nor reducing. 0 if the operation ended in the pass that issued it.
    pub fn waiting(&self) -> u64 {
        if self.blocked { self.took().saturating_sub(self.copying).saturating_sub(self.reducing) } else { 0 }
    }

    /// The caller's payload, like `Op::payload`.
    pub fn bytes(&self) -> u64 {
        self.read.max(self.written)
    }

    /// The rank for which the operation waited, if any.
    pub fn late(&self) -> Option<usize> {
        (self.late != NOBODY).then_some(self.late as usize)
    }
}

#[derive(Clone, Debug)]
pub struct History {
    records: Vec<Record>,
    room: usize,
    /// Number of operations issued so far.
    issued: u64,
}

impl History {
    /// A history for `room` records, rounded up to a power of two. Memory is touched only when it is first used.
    pub fn new(room: usize) -> History {
        let room = if room == 0 { 0 } else { room.next_power_of_two() };
        History { records: Vec::with_capacity(room), room, issued: 0 }
    }

    pub fn room(&self) -> usize {
        self.room
    }

    /// Number of operations issued since the group was made.
    pub fn issued(&self) -> u64 {
        self.issued
    }

    /// Assigns the next id to a record and stores the record. It is written in place and not moved.
    #[inline(always)]
    pub fn push(&mut self, record: Record) -> u64 {
        let id = self.issued;
        self.issued += 1;
        if self.room > 0 {
            if self.records.len() < self.room {
                self.records.push(Record::EMPTY);
            }
            let at = self.slot(id);
            self.records[at] = Record { id, ..record };
        }
        id
    }

    /// Removes the record `id` if it is the last one. Otherwise returns false.
    pub fn take_back(&mut self, id: u64) -> bool {
        if id + 1 != self.issued {
            return false;
        }
        self.issued = id;
        if self.records.len() as u64 > id {
            self.records.pop();
        } // else it stays until the next push; `iter` skips it because of its id
        true
    }

    /// A history with the same number of issued operations but without records.
    pub fn without_records(&self) -> History {
        History { records: Vec::new(), room: 0, issued: self.issued }
    }

    /// Id of the record that the next push overwrites, if there is one.
    #[inline]
    pub fn next_to_go(&self) -> Option<u64> {
        self.issued.checked_sub(self.room as u64)
    }

    fn slot(&self, id: u64) -> usize {
        id as usize & (self.room - 1)
    }

    /// The record with this id, unless it was overwritten.
    #[inline]
    pub fn get_mut(&mut self, id: u64) -> Option<&mut Record> {
        if self.room == 0 {
            return None;
        }
        let at = self.slot(id);
        self.records.get_mut(at).filter(|record| record.id == id)
    }

    /// The records, from the oldest to the newest.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Record> {
        let split = if self.records.len() < self.room || self.room == 0 { 0 } else { self.slot(self.issued) };
        let issued = self.issued;
        self.records[split..].iter().chain(&self.records[..split]).filter(move |record| record.id < issued)
    }

    /// The collectives, from the newest to the oldest.
    pub fn collectives(&self) -> impl Iterator<Item = &Record> {
        self.iter().rev().filter(|record| !record.kind.is_p2p())
    }

    /// The collective with this number in its group.
    pub fn collective(&self, number: u64) -> Option<&Record> {
        self.collectives().find(|record| record.number == number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(kind: Kind, number: u64, root: u32) -> Record {
        Record { read: 4, written: 8, ..Record::external_op(kind, 0, number, (root, 0), CallNote::default()) }
    }

    proptest! {
        #[test]
        fn it_holds_the_last_ones_in_order(room in 0usize..20, issued in 0u64..60) {
            let mut history = History::new(room);
            for number in 1..=issued {
                let id = history.push(record(Kind::Barrier, number, 0));
                prop_assert_eq!(id, number - 1);
            }
            let kept = issued.min(history.room() as u64);
            let ids: Vec<u64> = history.iter().map(|record| record.id).collect();
            prop_assert_eq!(ids, (issued - kept..issued).collect::<Vec<_>>());
            for number in 1..=issued {
                let there = number > issued - kept;
                prop_assert_eq!(history.collective(number).is_some(), there);
                prop_assert_eq!(history.get_mut(number - 1).is_some(), there);
            }
        }
    }

    proptest! {
        #[test]
        fn only_the_last_one_is_taken_back(room in 0usize..6, issued in 1u64..20, more in 0u64..9) {
            let mut history = History::new(room);
            for number in 1..=issued {
                history.push(record(Kind::Barrier, number, 0));
            }
            prop_assert!(issued == 1 || !history.take_back(issued - 2));
            prop_assert!(history.take_back(issued - 1) && !history.take_back(issued - 1));
            prop_assert_eq!(history.issued(), issued - 1);
            prop_assert!(history.iter().all(|record| record.number < issued));
            for number in 0..more {
                prop_assert_eq!(history.push(record(Kind::Barrier, issued + number, 0)), issued - 1 + number);
            }
            let numbers: Vec<u64> = history.iter().map(|record| record.number).collect();
            let lost = u64::from(more == 0 && issued > history.room() as u64 && history.room() > 0);
            let kept = (issued - 1 + more).min(history.room() as u64) - lost;
            prop_assert_eq!(numbers, (issued + more - kept..issued + more).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_record_is_as_large_as_the_documents_say() {
        assert_eq!(std::mem::size_of::<Record>(), 120); // docs/internals/statistics.md
    }

    #[test]
    fn a_collective_is_found_apart_from_messages_with_its_number() {
        let mut history = History::new(8);
        history.push(record(Kind::Send, 1, 2));
        history.push(record(Kind::Recv, 1, 2));
        history.push(record(Kind::AllReduce, 1, 0));
        history.push(record(Kind::Send, 1, 1));
        assert_eq!(history.collectives().count(), 1);
        assert_eq!(history.collective(1).unwrap().kind, Kind::AllReduce);
        assert_eq!(history.collective(1).unwrap().bytes(), 8);
        assert_eq!(history.collective(1).unwrap().late(), None);
    }
}
