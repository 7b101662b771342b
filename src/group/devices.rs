//! Implements the interface through which the device engine uses its group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Group;
use super::external::{Carrier, External, ExternalOp};
use crate::engine::device::{Agreed, Counted, DeviceGroup, DeviceRequest, Watched};
use crate::engine::{BlockSizes, Signed};
use crate::error::{Error, Result, in_one_line};
use crate::hang::timed_out;
use crate::hang::waiting::Waiting;
use crate::os::clock;
use crate::select::Policy;

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
        // A group of one rank, and a group that is too large for a rendezvous, have no id.
        (self.id != [0; 16]).then(|| Group::id(self))
    }
    fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }
    fn timeout(&self) -> Duration {
        self.timeouts.usual()
    }
    fn timeout_of_call(&self, asked: Option<Duration>) -> Duration {
        let timeout = asked.unwrap_or_else(|| self.timeout());
        if !self.timeouts.extends() {
            return timeout;
        }
        let inner = &mut *self.lock();
        self.timeouts.extended(&mut inner.extensions, |id| inner.external.get(id).is_some(), timeout)
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
        self.watch.ask_for_fault()
    }
    fn had_no_fault_at(&self, at: Instant) -> bool {
        self.watch.had_no_fault_at(at)
    }
    fn await_report(&self) {
        if self.has_failed() {
            self.watch.await_published();
        }
    }
    fn interrupted(&self) -> bool {
        self.host.interrupted()
    }
    fn dead_ranks(&self) -> Vec<usize> {
        self.faults.dead_ranks().collect()
    }
    fn left(&self, rank: usize) -> bool {
        self.control.left(rank)
    }
    fn launched(&self, rank: usize) -> Option<u64> {
        self.control.launched(rank).map(|(number, _)| number)
    }
    fn death_of(&self, rank: usize, during: &str) -> Error {
        self.faults.death_of(rank, during)
    }
    fn next_number(&self, signed: Signed, sizes: Option<&BlockSizes<'_>>) -> u64 {
        self.launches.sign(signed, sizes)
    }
    fn compare(&self, first: u64, last: u64) -> Agreed {
        self.launches.compare(first, last)
    }
    fn look_at_long_waits(&self) {
        self.watch.look_external(self);
    }
    fn deadline_passed(&self, watched: &Watched) -> Error {
        let waiting = self.on_device(watched).unwrap_or_else(|| {
            let (kind, number, root, timeout) =
                (watched.kind, watched.number, watched.peer.unwrap_or(0), watched.timeout);
            let (id, tag, bytes, site, issued, begun) = (External::NO_RECORD, 0, 0, 0, 0, None);
            let on_device = true;
            External { id, kind, number, root, tag, bytes, site, on_device, issued, begun, timeout }.waiting()
        });
        let (what, how) = (watched.what(), timed_out(watched.timeout));
        Error::timeout(self.watch.story(self, &waiting, (&what, &how), "", clock::now()))
    }
    fn failed_within(&self, watched: &Watched, words: &str) -> Option<Error> {
        let waiting = self.on_device(watched)?;
        let words = format!("the library: {}", in_one_line(words));
        let times = (watched.issued.elapsed(), watched.timeout);
        self.watch.failed_on_device(self, &waiting, (&watched.what(), &words), times)
    }
    fn count(&self, call: &DeviceRequest<'_>) -> Box<dyn Counted> {
        let (peer, bytes) = ((call.root, call.tag), (call.read(), call.written()));
        Box::new(self.external_op(call.asked.kind, Carrier::Device, peer, bytes, call.note, call.timeout))
    }
}

impl Group {
    /// The pending operation that the device thread watches.
    fn on_device(&self, watched: &Watched) -> Option<Waiting> {
        self.lock().external.on_device(watched.number, watched.peer).map(External::waiting)
    }
}

impl Counted for ExternalOp {
    fn end(&self, well: bool, timed: bool) {
        ExternalOp::end(self, well, timed);
    }
}
