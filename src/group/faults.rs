//! Records why a group is unusable (its first fault, peers that died or left, faults that peers report) and makes the
//! texts of these errors.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use once_cell::sync::OnceCell;

use super::role::Role;
use crate::engine::{Control, Ended, Engine, Told};
use crate::error::{Error, GO_ON, LEFT, Result, laid_out};
use crate::host::Host;
use crate::op::Op;

/// A leaving rank waits at most this long for the thread that tells the group's fault to the peers.
const ANNOUNCED: Duration = Duration::from_millis(500);

/// The process of a rank on this host.
pub(super) struct Peer {
    pub pid: i32,
    pub host: String,
    /// Set when the process has ended, by the thread that watches processes (release). Read by drivers (acquire).
    dead: AtomicBool,
}

impl Peer {
    pub fn new(pid: i32, host: String) -> Peer {
        Peer { pid, host, dead: AtomicBool::new(false) }
    }
}

pub(super) struct Faults {
    rank: usize,
    /// The group's name.
    name: String,
    role: Role,
    control: Arc<dyn Control>,
    host: Arc<dyn Host>,
    peers: Vec<Peer>,
    /// Whether some peer is dead. While it is false, a pass does not need to check each peer. The thread that watches
    /// processes sets it (release) after the peer's own flag; drivers read it (acquire).
    any_dead: AtomicBool,
    first: OnceCell<Error>,
    /// Whether the peers have been told the first fault. Notified when it becomes true.
    announced: (Mutex<bool>, Condvar),
    /// Whether a call of the delegate has failed, after which the delegate's group may be broken. Set by threads that
    /// see a call fail, read by any thread. Relaxed, because it guards no other data.
    delegate_failed: AtomicBool,
    /// Whether the group was destroyed. Set by the thread that destroys it (acquire and release), read by any thread
    /// (acquire).
    closed: AtomicBool,
}

impl Faults {
    /// The faults of rank `rank` in the group with this name.
    pub fn new(
        (rank, name, role): (usize, String, Role),
        control: Arc<dyn Control>,
        host: Arc<dyn Host>,
        peers: Vec<Peer>,
    ) -> Faults {
        let [any_dead, delegate_failed, closed] = [(); 3].map(|()| AtomicBool::new(false));
        Faults {
            rank,
            name,
            role,
            control,
            host,
            peers,
            any_dead,
            first: OnceCell::new(),
            announced: Default::default(),
            delegate_failed,
            closed,
        }
    }

    pub fn role(&self) -> &Role {
        &self.role
    }

    /// The group's first fault.
    pub fn first(&self) -> Option<&Error> {
        self.first.get()
    }

    /// Sets the group's fault if it has none, and returns whether it did. Later faults are ignored.
    pub fn set(&self, fault: Error) -> bool {
        self.first.set(fault).is_ok()
    }

    /// Called by the thread that has set the fault, after it has told the peers.
    pub fn set_announced(&self) {
        *self.announced.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.announced.1.notify_all();
    }

    /// If the group has failed, waits until the peers have been told, for at most `ANNOUNCED`. The thread that found
    /// the fault may not have told them yet; if this rank left first, the peers would think that this rank failed.
    pub fn await_announced(&self) {
        if self.first.get().is_none() {
            return;
        }
        let announced = self.announced.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.announced.1.wait_timeout_while(announced, ANNOUNCED, |announced| !*announced));
    }

    pub fn set_delegate_failed(&self) {
        self.delegate_failed.store(true, Ordering::Relaxed);
    }

    /// True if the group has failed, or if a call of its delegate has failed. A failed delegate call sets no fault,
    /// because the group's own engine may continue.
    pub fn has_failed(&self) -> bool {
        self.first.get().is_some() || self.delegate_failed.load(Ordering::Relaxed)
    }

    /// Marks the group as destroyed. Returns whether it already was.
    pub fn close(&self) -> bool {
        self.closed.swap(true, Ordering::AcqRel)
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Fails if the group has failed or was destroyed. Takes no lock.
    pub fn standing(&self) -> Result<()> {
        if let Some(fault) = self.first.get() {
            return Err(fault.clone());
        }
        if self.is_closed() {
            return Err(Error::aborted(format!("sagellm: group '{}' was destroyed", self.name)));
        }
        Ok(())
    }

    /// Called by the thread that watches processes.
    pub fn peer_ended(&self, rank: usize) {
        if let Some(peer) = self.peers.get(rank) {
            peer.dead.store(true, Ordering::Release);
            self.any_dead.store(true, Ordering::Release);
        }
    }

    pub fn any_dead(&self) -> bool {
        self.any_dead.load(Ordering::Acquire)
    }

    pub fn dead_ranks(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.peers.len()).filter(|rank| self.peers[*rank].dead.load(Ordering::Acquire))
    }

    /// The first rank that died without leaving in order.
    fn died(&self) -> Option<usize> {
        self.dead_ranks().find(|rank| !self.control.left(*rank))
    }

    /// Returns the error for a new operation if a peer died without leaving in order. The operation fails even if it
    /// does not need that peer.
    pub fn death_before(&self, what: &str) -> Option<Error> {
        let rank = self.died()?;
        Some(self.death_of(rank, &format!("calls {what}")))
    }

    pub fn death_of(&self, rank: usize, during: &str) -> Error {
        let peer = &self.peers[rank];
        let how =
            if self.control.left(rank) { LEFT } else { "ended (killed, crashed, or exited without leaving its group)" };
        let (rank, me) = (self.role.number(rank), self.role.number(self.rank));
        let head = format!("rank {rank} (pid {}, host {}) of group '{}' {how}", peer.pid, peer.host, self.name);
        Error::rank_failed(rank, laid_out(&head, &[], GO_ON)).while_rank(me, during)
    }

    /// Describes, for an error text, what this rank was doing when a peer was found missing.
    fn within(&self, op: Option<&Arc<Op>>) -> String {
        let Some(op) = op else { return "had nothing pending".to_string() };
        let called =
            self.host.call_site(op.request.note.site).map_or(String::new(), |site| format!(", called at {site}"));
        format!("is in {}{called}", op.what())
    }

    /// Returns a fault if a rank that died or left is still needed, else `None`. Called with the group's lock held,
    /// when nothing can advance.
    pub fn of_ended_peers(&self, engine: &mut dyn Engine, ended: &mut Ended) -> Option<Error> {
        let others = || (0..self.peers.len()).filter(|rank| *rank != self.rank);
        // First check the ranks that died, and then those that left: if a receive from any rank cannot complete, the
        // missing message is a dead rank's.
        let died = others().filter(|rank| !self.control.left(*rank));
        let left = others().filter(|rank| self.control.left(*rank));
        for rank in died.chain(left).filter(|rank| self.is_gone(*rank)) {
            // The peer's last data may have arrived after this rank's last pass, so complete the operations that it
            // satisfies. The data fits into the shared memory, so a bounded number of passes is enough.
            for _ in 0..1024 {
                match engine.poll(ended) {
                    Ok(true) => (),
                    Ok(false) => break,
                    Err(error) => return Some(error),
                }
            }
            if let Some(op) = engine.needs(rank, &|rank| self.is_gone(rank)) {
                return Some(self.death_of(rank, &self.within(Some(&op))));
            }
        }
        None
    }

    /// Whether `rank` sends nothing more, because it left or died.
    fn is_gone(&self, rank: usize) -> bool {
        self.peers[rank].dead.load(Ordering::Acquire) || self.control.left(rank)
    }

    /// The other ranks on this host that this rank watches, and for each of them whether it has died or left the group.
    pub fn watched(&self) -> Vec<(usize, bool)> {
        if self.peers.is_empty() {
            return self.control.watched();
        }
        let others = (0..self.peers.len()).filter(|rank| *rank != self.rank);
        others.map(|rank| (rank, self.is_gone(rank))).collect()
    }

    /// Description of the process of a rank on this host.
    pub fn process(&self, rank: usize) -> String {
        self.peers.get(rank).map_or_else(String::new, |peer| format!("pid {}, host {}", peer.pid, peer.host))
    }

    /// The fault that a peer reported, as an error of this rank. The report came through the engine or in another way
    /// (`told`). With `engine`, the error names the operation of this rank that the fault ends.
    pub fn reported(&self, told: impl FnOnce() -> Option<Told>, engine: Option<&dyn Engine>) -> Option<Error> {
        let (rank, fault) = self.control.reported().or_else(told)?;
        if let Some(own) = self.first.get() {
            return Some(own.clone()); // another thread of this rank has set it
        }
        // A death that this rank saw itself is more reliable than a peer's report.
        if let Some(dead) = self.died() {
            let op = engine
                .and_then(|engine| engine.needs(dead, &|rank| self.is_gone(rank)).or_else(|| engine.next_deadline()));
            return Some(self.death_of(dead, &self.within(op.as_ref())));
        }
        Some(fault.as_told().reported_by(self.role.number(rank)))
    }
}
