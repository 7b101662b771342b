//! The group, as the engine of its devices uses it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Group;
use super::hang::{seconds, timed_out};
use super::outside::{Carrier, ExternalOp, Outside};
use super::pending::Pending;
use crate::engine::device::{Agreed, Counted, DeviceGroup, DeviceRequest, Watched};
use crate::engine::{Lacks, Signed};
use crate::error::{Error, Result, in_one_line};
use crate::os::clock;
use crate::select::Policy;

/// After a failure of a library: how long the fault of another rank, which may be its cause, takes to be seen in shared
/// memory, where it stands before that rank ends its communicators, or to be read from the store.
const FAULT_SEEN: Duration = Duration::from_millis(250);
const FAULT_READ: Duration = Duration::from_millis(1000);

impl DeviceGroup for Group {
    fn name(&self) -> &str {
        &self.config.name
    }
    fn rank(&self) -> usize {
        self.config.rank
    }
    fn size(&self) -> usize {
        self.config.size
    }
    fn id(&self) -> Option<String> {
        // A group too large for a rendezvous has none.
        (self.id != [0; 16]).then(|| Group::id(self))
    }
    fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }
    fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed))
    }
    fn timeout_of_call(&self, asked: Option<Duration>) -> Duration {
        let timeout = asked.unwrap_or_else(|| self.timeout());
        if !self.extends.load(Ordering::Relaxed) {
            return timeout;
        }
        self.extended(&mut self.lock(), timeout)
    }
    fn usable(&self, what: &str) -> Result<()> {
        Group::usable(self, what)
    }
    fn fault(&self) -> Option<Error> {
        self.reported(None).or_else(|| Group::fault(self))
    }
    fn fail(&self, error: Error) {
        self.poison(error);
    }
    fn ask_for_fault(&self) -> Duration {
        if self.board.get().is_none() {
            return FAULT_SEEN;
        }
        self.asks_why.store(true, Ordering::Relaxed);
        self.domain.look_again();
        FAULT_READ
    }
    fn interrupted(&self) -> bool {
        self.host.interrupted()
    }
    fn dead_ranks(&self) -> Vec<usize> {
        Group::dead_ranks(self).collect()
    }
    fn left(&self, rank: usize) -> bool {
        self.control.left(rank)
    }
    fn launched(&self, rank: usize) -> Option<u64> {
        self.control.launched(rank).map(|(number, _)| number)
    }
    fn death_of(&self, rank: usize, during: &str) -> Error {
        Group::death_of(self, rank, during)
    }
    fn next_number(&self, signed: Signed) -> u64 {
        self.sign_launch(signed)
    }
    fn compare(&self, first: u64, last: u64) -> Agreed {
        self.compare_launches(first, last)
    }
    fn look_at_long_waits(&self) {
        self.look_outside();
    }
    fn deadline_passed(&self, watched: &Watched) -> Error {
        let (kind, peer) = (watched.kind, watched.peer);
        let inner = self.lock();
        let pending = inner.outside.on_device(watched.number, peer).cloned().unwrap_or(Outside {
            id: Outside::NO_RECORD,
            kind,
            number: watched.number,
            root: peer.unwrap_or(0),
            tag: 0,
            bytes: 0,
            site: 0,
            on_device: true,
            begun: None,
            timeout: watched.timeout,
        });
        let (pending, now) = (Pending::Outside(pending), clock::now());
        Error::timeout(self.story((&inner, &pending), (&watched.what(), &timed_out(watched.timeout)), "", now))
    }
    fn failed_within(&self, watched: &Watched, words: &str) -> Option<Error> {
        let inner = self.lock();
        let outside = inner.outside.on_device(watched.number, watched.peer).cloned()?;
        let (age, now) = (watched.issued.elapsed(), clock::now());
        let pending = Pending::Outside(outside);
        // Before the ranks were asked, one that has not come yet may merely be on its way.
        if !inner.watched_outside.is(&pending) || !matches!(self.lacks(&inner, &pending), Lacks::Ranks(_)) {
            return None;
        }
        let is_late = !watched.timeout.is_zero() && age > watched.timeout * 9 / 10;
        let how = if is_late { timed_out(age) } else { format!("failed after {}", seconds(age.as_millis() as u64)) };
        let words = format!("the library: {}", in_one_line(words));
        let text = self.story((&inner, &pending), (&watched.what(), &how), &words, now);
        Some(if is_late { Error::timeout(text) } else { Error::system(text) })
    }
    fn count(&self, call: &DeviceRequest<'_>) -> Box<dyn Counted> {
        let (peer, bytes) = ((call.root, call.tag), (call.read(), call.written()));
        Box::new(self.external_op(call.asked.kind, Carrier::Device, peer, bytes, call.note, call.timeout))
    }
}

impl Counted for ExternalOp {
    fn end(&self, well: bool, timed: bool) {
        ExternalOp::end(self, well, timed);
    }
}
